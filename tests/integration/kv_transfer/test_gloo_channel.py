"""What the pools rely on: a buffer is its owner's again once its `wait` has returned or raised."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from kv_transfer.backend import LinkBrokenError, LinkTimeoutError
from kv_transfer.gloo_channel import GlooChannel

# more than the sockets' buffers hold, so that a send is under way for as long as nobody reads
NUM_BYTES = 32 << 20


@contextmanager
def connected() -> Iterator[list[GlooChannel]]:
    store = HashStore()

    def make(rank: int) -> GlooChannel:
        return GlooChannel(store, rank=rank, group_name="pair", interface="", timeout_s=20.0)

    with ThreadPoolExecutor(2) as threads:
        made = list(threads.map(make, (0, 1)))
    yield made
    for channel in made:
        channel.close()


def send(channel: GlooChannel) -> None:
    with suppress(LinkBrokenError):
        channel.send(torch.full((NUM_BYTES,), 9, dtype=torch.uint8)).wait(1.0)


@pytest.fixture
def channels() -> Iterator[list[GlooChannel]]:
    with connected() as made:
        yield made


def test_a_send_after_the_deadline_does_not_land(channels: list[GlooChannel]) -> None:
    buffers = [torch.zeros(NUM_BYTES, dtype=torch.uint8) for _ in range(3)]
    receiving = [channels[1].receive(buffer) for buffer in buffers]
    with pytest.raises(LinkTimeoutError):
        receiving[0].wait(0.05)
    for operation in receiving[1:]:
        with pytest.raises(LinkBrokenError):
            operation.wait(0.05)
    send(channels[0])
    assert not any(bool(buffer.any()) for buffer in buffers)


@pytest.mark.parametrize("after_s", [0.0, 0.002, 0.005])
def test_bytes_that_are_on_their_way_stop_with_an_abort(after_s: float) -> None:
    # On a machine that does other things everything may be there before an abort comes.
    for _ in range(5):
        with connected() as channels:
            if num_stopped(channels, after_s):
                return
    raise AssertionError("everything was there before each abort")


def num_stopped(channels: list[GlooChannel], after_s: float) -> int:
    """Operations that an abort stopped: their buffers stay as they were."""
    buffers = [torch.zeros(NUM_BYTES, dtype=torch.uint8) for _ in range(4)]
    receiving = [channels[1].receive(buffer) for buffer in buffers]
    sending = threading.Thread(target=lambda: [send(channels[0]) for _ in buffers])
    sending.start()
    threading.Event().wait(after_s)
    channels[1].abort()
    errors = 0
    for operation in receiving:
        try:
            operation.wait(20.0)
        except LinkBrokenError:
            errors += 1
    seen = [buffer.clone() for buffer in buffers]
    sending.join()
    for buffer, before in zip(buffers, seen, strict=True):
        assert torch.equal(buffer, before), "bytes landed in a buffer that was its owner's again"
    return errors
