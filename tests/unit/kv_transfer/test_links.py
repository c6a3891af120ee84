"""Who links with whom, and how links end and come back; over fake wires."""

import asyncio
import os
import threading
import time
from collections import Counter
from datetime import timedelta

import pytest

from kv_transfer import nccl_settings
from kv_transfer.backend import LinkBrokenError
from kv_transfer.config import KVTransferConfig
from kv_transfer.control import (
    LinkAccepted,
    LinkAlive,
    LinkIncompatible,
    LinkMessage,
    LinkOpen,
    PeerInfo,
    StaleLinkError,
    WorkerRef,
)
from kv_transfer.link import LinkSpec
from kv_transfer.link_acceptor import LinkAcceptor
from kv_transfer.link_end import LinkEnd
from kv_transfer.link_status import LinkState
from kv_transfer.live_link import LiveLink
from kv_transfer.peer_link import LinkIdentity
from kv_transfer.peer_views import PeerViews, choose_peers
from kv_transfer.place import NOWHERE, Place
from kv_transfer.store import RendezvousStore
from tests.unit.kv_transfer.fakes import (
    CPU,
    DECODE,
    PREFILL,
    FakeLink,
    Pair,
    QueueControl,
    Wire,
    Wires,
    control_pair,
    eventually,
    make_layout,
)

NEAR, FAR = Place("near", "a"), Place("far", "b")


def peer(number: int, *, place: Place = NOWHERE, incarnation: int = 1) -> PeerInfo:
    return PeerInfo(worker=WorkerRef(f"prefill-{number}", incarnation), address="x", place=place)


def test_union_of_fresh_views_with_the_highest_incarnation() -> None:
    clock = [0.0]
    views = PeerViews(lambda: clock[0])
    views.update("a", [peer(1), peer(2)])
    clock[0] = 20.0
    views.update("b", [peer(2, incarnation=5)])
    assert {p.worker for p in views.peers().values()} == {
        WorkerRef("prefill-1", 1),
        WorkerRef("prefill-2", 5),
    }
    clock[0] = 31.0
    assert set(views.peers()) == {"prefill-2"}


def test_chosen_peers_are_few_near_and_spread() -> None:
    peers = [peer(number, place=FAR) for number in range(40)] + [peer(99, place=NEAR)]
    load: dict[str, int] = {}
    for number in range(30):
        chosen = choose_peers(peers, worker_id=f"decode-{number}", place=NEAR, max_links=8)
        assert len(chosen) == 8
        assert chosen[0].worker.worker_id == "prefill-99"
        for one in chosen[1:]:
            load[one.worker.worker_id] = load.get(one.worker.worker_id, 0) + 1
    assert max(load.values()) < 20
    fewer = choose_peers(peers[1:], worker_id="decode-0", place=NEAR, max_links=8)
    before = choose_peers(peers, worker_id="decode-0", place=NEAR, max_links=8)
    assert len({p.worker for p in before} - {p.worker for p in fewer}) <= 1


def test_the_same_zone_is_nearer_than_another_one() -> None:
    peers = [peer(1, place=FAR), peer(2, place=Place("next", "a")), peer(3, place=NEAR)]
    chosen = choose_peers(peers, worker_id="decode-0", place=NEAR, max_links=3)
    assert [each.worker.worker_id for each in chosen] == ["prefill-3", "prefill-2", "prefill-1"]


@pytest.mark.parametrize(
    ("reach", "reached"), [("any", {1, 2, 3}), ("zone", {2, 3}), ("node", {3})]
)
def test_nobody_out_of_reach_is_linked(reach: str, reached: set[int]) -> None:
    peers = [peer(1, place=FAR), peer(2, place=Place("next", "a")), peer(3, place=NEAR)]
    chosen = choose_peers(peers, worker_id="decode-0", place=NEAR, max_links=8, reach=reach)
    assert {each.worker.worker_id for each in chosen} == {f"prefill-{n}" for n in reached}


def test_nodes_without_a_zone_are_in_one() -> None:
    assert Place("a").reach_to(Place("b")) == "zone"
    assert Place("a").reach_to(Place("b", "z")) == "any"
    assert Place().reach_to(Place()) == "zone", "a node without a name is not known to be the same"


def test_the_store_is_mirrored_and_enforces_its_own_timeout() -> None:
    told = []
    store = RendezvousStore(lambda key, value: told.append((key, value)), timeout_s=0.05)
    store.set("a", "text")
    assert told == [("a", b"text")]
    store.deliver("b", b"2")
    assert told == [("a", b"text")]
    assert store.get("b") == b"2"
    assert store.check(["a", "b"])
    assert not store.check(["c"])
    with pytest.raises(TimeoutError):
        store.get("c")
    with pytest.raises(TimeoutError):
        store.wait(["a", "c"], timedelta(seconds=100))
    patient = RendezvousStore(lambda key, value: None, timeout_s=30.0)
    threading.Timer(0.01, patient.close, ["peer gone"]).start()
    with pytest.raises(ConnectionError, match="peer gone"):
        RendezvousStore.get(patient, "c")


def test_nccl_settings_keep_the_process_alive() -> None:
    environ = {"NCCL_LAUNCH_ORDER_IMPLICIT": "1"}
    config = KVTransferConfig(transfer_timeout_s=4.5, interface="eth7")
    assert "TORCH_NCCL_BLOCKING_WAIT" in nccl_settings.missing(config, environ)
    nccl_settings.apply(config, environ)
    assert nccl_settings.missing(config, environ) == []
    assert environ == {
        "TORCH_NCCL_BLOCKING_WAIT": "1",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
        "TORCH_NCCL_ENABLE_MONITORING": "0",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
        "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
        "TORCH_NCCL_PROPAGATE_ERROR": "0",
        "TORCH_NCCL_DESYNC_DEBUG": "0",
        "TORCH_NCCL_TRACE_BUFFER_SIZE": "0",
        "TORCH_NCCL_NONBLOCKING_TIMEOUT": "5",
        "TORCH_DISTRIBUTED_DEBUG": "OFF",
        "NCCL_CUMEM_ENABLE": "1",
        "NCCL_RAS_ENABLE": "0",
        "NCCL_NVLS_ENABLE": "0",
        "NCCL_SOCKET_IFNAME": "eth7",
        "GLOO_SOCKET_IFNAME": "eth7",
        "CUDA_DEVICE_MAX_CONNECTIONS": "32",
    }
    assert os.environ.get("NCCL_SOCKET_IFNAME") != "eth7"


def open_message(**changes) -> LinkOpen:
    fields = {
        "decode_worker": DECODE,
        "generation": 1,
        "layout": make_layout(4),
        "end": LinkEnd(backend="gloo"),
        "prefill_incarnation": PREFILL.incarnation,
    }
    return LinkOpen(**{**fields, **changes})


async def test_incompatible_pools_say_why() -> None:
    identity = LinkIdentity(worker=PREFILL, layout=make_layout(4), device=CPU)
    acceptor = LinkAcceptor(identity, config=KVTransferConfig())
    cases = (
        ({"layout": make_layout(4, dtype="bfloat16")}, "'float32' here, 'bfloat16' there"),
        ({"end": LinkEnd(backend="nccl")}, "nccl: not both pools lie on GPUs"),
    )
    for generation, (changes, reason) in enumerate(cases, start=1):
        near, far = control_pair()
        await acceptor.serve(open_message(generation=generation, **changes), far)
        answer = await near.receive()
        assert isinstance(answer, LinkIncompatible)
        assert reason in answer.reason
    await acceptor.close()


async def test_an_incompatible_peer_is_reported_and_left_alone() -> None:
    pair = Pair()
    pair.p_layout = make_layout(4, model_id="other")
    pair.acceptor = LinkAcceptor(
        LinkIdentity(worker=PREFILL, layout=pair.p_layout, device=CPU), config=pair.config
    )
    pair.dialer.set_peers("ingress", [PeerInfo(worker=PREFILL, address="here")])
    await eventually(lambda: pair.dialer.statuses()[0].state is LinkState.INCOMPATIBLE)
    assert "model_id" in pair.dialer.statuses()[0].reason
    assert pair.dialer.link_for(PREFILL.worker_id) is None
    await pair.close()


async def test_stale_opens_change_nothing() -> None:
    pair = Pair()
    await pair.link_up()
    link = pair.link
    _, far = control_pair()
    with pytest.raises(StaleLinkError):
        await pair.acceptor.serve(open_message(generation=1), far)
    with pytest.raises(StaleLinkError):
        await pair.acceptor.serve(open_message(generation=9, prefill_incarnation=1), far)
    older = WorkerRef(DECODE.worker_id, DECODE.incarnation - 1)
    with pytest.raises(StaleLinkError):
        await pair.acceptor.serve(open_message(generation=9, decode_worker=older), far)
    assert pair.link is link
    assert link.is_usable
    await pair.close()


async def test_a_newer_process_replaces_the_link() -> None:
    pair = Pair()
    await pair.link_up()
    near, far = control_pair()
    newer = WorkerRef(DECODE.worker_id, DECODE.incarnation + 1)
    old = pair.link
    serving = asyncio.create_task(pair.acceptor.serve(open_message(decode_worker=newer), far))
    pair.serving.add(serving)
    assert isinstance(await near.receive(), LinkAccepted)
    await eventually(lambda: not old.is_usable)
    await near.close()
    await pair.close()


async def test_a_broken_link_comes_back_with_the_next_generation() -> None:
    pair = Pair()
    await pair.link_up()
    for generation in (2, 3):
        pair.link.live.fail("test")
        await eventually(lambda: pair.dialer.link_for(PREFILL.worker_id) is None)
        await pair.link_up()
        assert pair.link.generation == generation
    await pair.close()


async def test_a_link_that_had_worked_is_made_again_without_a_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kv_transfer.peer_link._FIRST_PAUSE_S", 60.0)
    monkeypatch.setattr("kv_transfer.peer_link._LONGEST_PAUSE_S", 60.0)
    monkeypatch.setattr("kv_transfer.peer_link._STABLE_AFTER_S", 60.0)
    pair = Pair()
    await pair.link_up()
    # one that has just been made and breaks may do so again and again
    with monkeypatch.context() as patch:
        patch.setattr("kv_transfer.peer_link._STABLE_AFTER_S", 0.0)
        pair.link.live.fail("test")
        await pair.link_up()
    assert pair.link.generation == 2
    pair.link.live.fail("test")
    await eventually(lambda: pair.dialer.statuses()[0].state is LinkState.BROKEN)
    await asyncio.sleep(0.05)
    assert pair.dialer.statuses()[0].generation == 2
    await pair.close()


async def test_a_peer_that_falls_silent_ends_the_link_at_both_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As when a network loses all that is sent, and that an end was closed with it."""

    async def lose(_control: QueueControl, _message: LinkMessage) -> None:
        return

    async def close_here(control: QueueControl) -> None:
        control.is_closed = True
        control.inbox.put_nowait(None)

    said = Counter[type[LinkMessage]]()
    send = QueueControl.send

    async def count(control: QueueControl, message: LinkMessage) -> None:
        said[type(message)] += 1
        await send(control, message)

    pair = Pair(config=KVTransferConfig(transfer_timeout_s=0.1))
    await pair.link_up()
    link = pair.link
    monkeypatch.setattr(QueueControl, "send", count)
    begun_s = time.monotonic()
    await asyncio.sleep(0.3)
    assert pair.link is link, "a quiet link lives on"
    # In a timeout each side says twice that it lives, and nothing else.
    assert said.keys() == {LinkAlive}
    assert said[LinkAlive] <= 2 * (1 + (time.monotonic() - begun_s) / 0.05)
    monkeypatch.setattr(QueueControl, "send", lose)
    monkeypatch.setattr(QueueControl, "close", close_here)
    accepted = pair.acceptor.link_for(DECODE, 1)
    await eventually(lambda: link.live.ended.done() and accepted.live.ended.done())
    assert "silent" in link.live.ended.result()
    assert "silent" in accepted.live.ended.result()
    monkeypatch.undo()
    await pair.link_up()
    assert pair.link.generation > link.generation
    await pair.close()


async def test_views_without_the_peer_close_no_live_link() -> None:
    pair = Pair()
    await pair.link_up()
    pair.dialer.set_peers("ingress", [])
    assert pair.dialer.link_for(PREFILL.worker_id) is not None
    # once it is down it is dialled no more
    pair.link.live.fail("gone")
    await eventually(lambda: pair.dialer.link_for(PREFILL.worker_id) is None)
    pair.dialer.set_peers("ingress", [])
    await eventually(lambda: pair.dialer.statuses() == [])
    await pair.close()


async def test_a_new_incarnation_replaces_the_old_peer() -> None:
    pair = Pair()
    await pair.link_up()
    old = pair.link
    reborn = WorkerRef(PREFILL.worker_id, PREFILL.incarnation + 1)
    await pair.acceptor.close()
    pair.acceptor = LinkAcceptor(
        LinkIdentity(worker=reborn, layout=pair.p_layout, device=CPU),
        config=pair.config,
        make_link=pair.wires.make,
    )
    pair.dialer.set_peers("ingress", [PeerInfo(worker=reborn, address="here")])
    await eventually(lambda: pair.dialer.link_for(PREFILL.worker_id, reborn.incarnation))
    assert not old.is_usable
    assert pair.dialer.link_for(PREFILL.worker_id, PREFILL.incarnation) is None
    await pair.close()


def test_views_are_bounded() -> None:
    views = PeerViews(lambda: 0.0)
    with pytest.raises(ValueError, match="1025 peers"):
        views.update("huge", [peer(number) for number in range(1025)])
    assert views.peers() == {}
    for number in range(200):
        views.update(f"ingress-{number}", [peer(number)])
    assert len(views.peers()) == 64
    assert "prefill-199" in views.peers()


async def test_a_view_full_of_names_pushes_no_working_link_out() -> None:
    """Peers that nobody can reach cost their places only for as long as they are tried."""
    pair = Pair(config=KVTransferConfig(transfer_timeout_s=0.2, max_links=2))
    await pair.link_up()
    link = pair.link
    real = PeerInfo(worker=PREFILL, address="here")
    ghosts = [peer(number) for number in range(1, 60)]
    for _ in range(20):
        pair.dialer.set_peers("ingress", [real, *ghosts])
        await asyncio.sleep(0.01)
        assert pair.dialer.link_for(PREFILL.worker_id) is link
    assert len(pair.dialer.statuses()) <= 3
    # also one whose link has to be made anew gets its turn
    link.live.fail("test")
    async with asyncio.timeout(30.0):
        while pair.dialer.link_for(PREFILL.worker_id) is None:
            pair.dialer.set_peers("ingress", [real, *ghosts[:2]])
            await asyncio.sleep(0.02)
    await pair.close()


async def test_links_end_while_the_loops_own_threads_are_taken() -> None:
    """What blocks there, be it the end of other links, holds up no link's abort."""
    pair = Pair()
    await pair.link_up()
    taken = threading.Event()
    blocking = [asyncio.ensure_future(asyncio.to_thread(taken.wait)) for _ in range(40)]
    try:
        async with asyncio.timeout(pair.config.transfer_timeout_s / 2):
            await pair.link.live.close("test")
    finally:
        taken.set()
        await asyncio.gather(*blocking)
        await pair.close()


class SlowLink(FakeLink):
    """One whose building nothing interrupts."""

    release = threading.Event()

    def build(self) -> None:
        assert self.release.wait(30.0)
        super().build()


async def test_what_a_peer_may_read_stays_its_own_until_the_links_thread_has_ended() -> None:
    wires, control = Wires(), control_pair()[0]
    spec = LinkSpec(link_id="a", is_sender=True, backend="gloo", timeout_s=0.1, device=CPU)
    live = LiveLink(
        spec,
        control,
        peer_layout=make_layout(),
        make_link=lambda spec, store: SlowLink(wires.by_id.setdefault("a", Wire()), spec, store),
    )
    with pytest.raises(LinkBrokenError):
        await live.build()
    await live.close("test")
    assert not live.unread.done()
    SlowLink.release.set()
    await asyncio.wait_for(live.unread, 20.0)
