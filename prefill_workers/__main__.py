"""`python -m prefill_workers --config FILE.json --rank N`: one prefill worker without Ray."""

import sys

from prefill_workers.kind import PREFILL
from workers import process

if __name__ == "__main__":
    process.main(PREFILL, sys.argv[1:])
