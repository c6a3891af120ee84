"""What only two GPUs can show: `python -m bench.two_gpus` (`make gpu2`).

1. Bandwidth of a link beside the device's own copy, 1 MiB to 256 MiB.
2. The abort of link A returns while a kernel of link B spins, and B goes on.
3. 33 rebuilds, after each of which bytes still arrive.
4. Memory that a link costs with 2 and with 4 channels.
Exits with 1 when one of them fails.
"""

import sys
import traceback
from collections.abc import Callable

import torch

from bench.link_pair import TIMEOUT_S, LinkPair

_SIZES_MIB = (1, 4, 16, 64, 256)
_NUM_REBUILDS = 33


def show_bandwidth(pair: LinkPair) -> None:
    """Print one row for each size; the best of five of both."""
    pair.build("bandwidth")
    for mib in _SIZES_MIB:
        num_bytes = mib << 20
        link_s = min(pair.move("bandwidth", num_bytes) for _ in range(5))
        copy_s = min(pair.receiver.do("copy_on_device", num_bytes) for _ in range(5))
        rates = [num_bytes / seconds / 1e9 for seconds in (link_s, copy_s)]
        print(f"{mib:>5} MiB   link {rates[0]:8.2f} GB/s   copy on device {rates[1]:8.2f} GB/s")
    pair.abort("bandwidth")


def check_abort_beside_a_spinning_link(pair: LinkPair) -> None:
    """Abort A while B's receive waits for a send that comes later."""
    pair.build("A")
    pair.build("B")
    pair.receiver.do("post_receive", "B", 1 << 20)
    seconds = pair.abort("A")
    print(f"abort of A while B spins: {seconds[0]:.3f} s and {seconds[1]:.3f} s")
    assert max(seconds) < TIMEOUT_S, "the abort did not return"
    pair.sender.do("send", "B", 1 << 20)
    pair.move("B", 1 << 20, value=3)
    pair.abort("B")


def check_rebuilds(pair: LinkPair) -> None:
    """One link in 33 generations."""
    before = pair.receiver.do("used_bytes")
    for generation in range(_NUM_REBUILDS):
        pair.build(f"g{generation}")
        pair.move(f"g{generation}", 1 << 20, value=generation)
        pair.abort(f"g{generation}")
    grown_mib = (pair.receiver.do("used_bytes") - before) / 2**20
    print(f"{_NUM_REBUILDS} rebuilds: the receiver's device holds {grown_mib:.0f} MiB more")


def show_memory(pair: LinkPair) -> None:
    """Memory of one link that has moved bytes, by its number of channels."""
    for max_ctas in (2, 4):
        for end in (pair.sender, pair.receiver):
            end.do("set_max_ctas", max_ctas)
        before = [end.do("used_bytes") for end in (pair.sender, pair.receiver)]
        pair.build(f"ctas-{max_ctas}")
        pair.move(f"ctas-{max_ctas}", 64 << 20)
        after = [end.do("used_bytes") for end in (pair.sender, pair.receiver)]
        costs = [(late - early) / 2**20 for early, late in zip(before, after, strict=True)]
        print(f"max_ctas {max_ctas}: sender {costs[0]:.0f} MiB, receiver {costs[1]:.0f} MiB")
        pair.abort(f"ctas-{max_ctas}")


def main() -> int:
    """Run all four; the exit status."""
    if torch.cuda.device_count() < 2:
        print(f"skipped: {torch.cuda.device_count()} CUDA devices here, two are needed")
        return 0
    status = 0
    steps: list[Callable[[LinkPair], None]] = [
        show_bandwidth,
        check_abort_beside_a_spinning_link,
        check_rebuilds,
        show_memory,
    ]
    for step in steps:
        # Processes of its own for each: what one breaks is not the next one's.
        pair = LinkPair(("cuda:0", "cuda:1"), ({}, {}))
        try:
            step(pair)
        except Exception:  # noqa: BLE001 - the other steps run all the same
            traceback.print_exc()
            status = 1
        finally:
            pair.close()
    return status


if __name__ == "__main__":
    sys.exit(main())
