"""What surrounds an NCCL communicator, with the process group itself replaced."""

import threading
import time
from collections.abc import Iterator

import pytest
import torch

from kv_transfer import nccl_channel
from kv_transfer.backend import LinkBrokenError, LinkTimeoutError
from kv_transfer.link import Link, LinkSpec
from kv_transfer.nccl_channel import DevicePosting, NcclChannel
from kv_transfer.store import RendezvousStore

CUDA = torch.device("cuda:0")


class FakeWork:
    def __init__(self) -> None:
        self.is_done = False

    def is_completed(self) -> bool:
        return self.is_done


class FakeGroup:
    """A process group that records what was posted; its abort may hang."""

    def __init__(self) -> None:
        self.posted: list[str] = []
        self.may_abort = threading.Event()
        self.may_abort.set()
        self.error = ""

    def _post(self, kind: str) -> FakeWork:
        if self.error:
            raise RuntimeError(self.error)
        self.posted.append(kind)
        return FakeWork()

    def send(self, tensors: list, peer: int, tag: int) -> FakeWork:
        return self._post("send")

    def recv(self, tensors: list, peer: int, tag: int) -> FakeWork:
        return self._post("recv")

    def abort(self) -> None:
        self.may_abort.wait(60.0)


@pytest.fixture(autouse=True)
def groups(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[FakeGroup]]:
    made: list[FakeGroup] = []

    def build(store, rank, device, options) -> FakeGroup:
        made.append(FakeGroup())
        return made[-1]

    monkeypatch.setattr(nccl_channel, "_build", build)
    monkeypatch.setattr(nccl_channel, "_options", lambda name, timeout_s: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda *args, **kwargs: None)
    monkeypatch.setattr(DevicePosting, "_instances", {})
    yield made
    for group in made:
        group.may_abort.set()


def make_channel(number: int = 0) -> NcclChannel:
    store = RendezvousStore(lambda key, value: None, timeout_s=1.0)
    return NcclChannel(store, rank=0, group_name=f"g{number}", device=CUDA, timeout_s=60.0)


def test_live_links_never_share_a_stream_over_33_rebuilds() -> None:
    kept = make_channel()
    for number in range(33):
        rebuilt = make_channel(number)
        assert rebuilt._slot != kept._slot
        rebuilt.abort()
        rebuilt.close()
    channels = [make_channel(number) for number in range(31)]
    assert len({channel._slot for channel in [kept, *channels]}) == 32
    with pytest.raises(LinkBrokenError, match="32 links"):
        make_channel()


def test_an_operation_ends_at_our_own_deadline() -> None:
    operation = make_channel().send(torch.zeros(1))
    started = time.monotonic()
    with pytest.raises(LinkTimeoutError):
        operation.wait(0.05)
    assert 0.05 <= time.monotonic() - started < 30.0


def test_what_the_group_raises_breaks_the_link(groups: list[FakeGroup]) -> None:
    channel = make_channel()
    groups[0].error = "unhandled system error"
    with pytest.raises(LinkBrokenError, match="unhandled system error"):
        channel.receive(torch.zeros(1))
    groups[0].error = ""
    channel.abort()
    with pytest.raises(LinkBrokenError, match="aborted"):
        channel.send(torch.zeros(1))
    assert groups[0].posted == []


def test_an_abort_that_hangs_holds_up_no_other_link_and_is_reported(
    groups: list[FakeGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck: list[str] = []
    spec = LinkSpec(
        link_id="a",
        is_sender=True,
        backend="nccl",
        timeout_s=0.1,
        device=CUDA,
        on_stuck=stuck.append,
    )
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: None)
    link = Link(spec, RendezvousStore(lambda key, value: None, timeout_s=1.0))
    link.build()
    other = make_channel(1)
    groups[0].may_abort.clear()
    started = time.monotonic()
    link.abort("test")
    assert 0.1 <= time.monotonic() - started < 30.0
    assert stuck == ["a"]
    # somebody else's posts do not wait behind it
    other.send(torch.zeros(1))
    assert groups[1].posted == ["send"]
    link.close()
    assert 0 in DevicePosting.of(CUDA)._live_slots, "its stream is not free while the abort hangs"
