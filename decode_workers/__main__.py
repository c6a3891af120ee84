"""`python -m decode_workers --config FILE.json --rank N`: one decode worker without Ray."""

import sys

from decode_workers.kind import DECODE
from workers import process

if __name__ == "__main__":
    process.main(DECODE, sys.argv[1:])
