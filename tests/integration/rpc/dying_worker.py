"""A process that serves until it is killed: `python -m tests.integration.rpc.dying_worker`."""

import asyncio
import sys

from tests.integration.rpc.conftest import Served


async def main():
    """Say where we listen, then serve."""
    served = await Served().start()
    sys.stdout.write(served.address + "\n")
    sys.stdout.flush()
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
