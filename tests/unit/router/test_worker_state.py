import pytest
from relevo.v1 import common_pb2, state_pb2

from engine.block_hash import BlockHash
from router.prefix_index import PrefixIndex
from router.worker_state import Change, ResyncNeededError, WorkerState, WrongWorkerError
from router.worker_view import Pending, WorkerKey
from rpc.description import WorkerDescription

State = state_pb2.WatchStateResponse
KEY = WorkerKey("decode-0", 7)
HASHES = [BlockHash(bytes([n]) * 32) for n in range(6)]


class Attempt:
    def __init__(self) -> None:
        self.reasons: list[str] = []

    def lose_worker(self, key: WorkerKey, reason: str) -> None:
        self.reasons.append(reason)


class Stream:
    """Numbers messages as a worker does."""

    def __init__(self, worker: WorkerState, now_s: float = 0.0) -> None:
        self.worker = worker
        self.sequence = 0
        self.now_s = now_s
        worker.start_stream()

    def send(self, **body: object) -> Change:
        message = State(sequence=self.sequence, **body)  # type: ignore[arg-type]
        self.sequence += 1
        return self.worker.apply(message, now_s=self.now_s)

    def synced(self, **load: object) -> "Stream":
        ref = common_pb2.WorkerRef(worker_id=KEY.worker_id, incarnation=KEY.incarnation)
        layout = common_pb2.KVLayout(block_size=16)
        self.send(
            hello=State.Hello(
                worker=ref, layout=layout, pool="decode", num_kv_blocks=4, max_num_seqs=2
            )
        )
        self.send(snapshot_chunk=State.SnapshotChunk(block_hashes=HASHES[:2]))
        self.send(snapshot_chunk=State.SnapshotChunk(block_hashes=HASHES[2:3], last=True))
        self.send(load=state_pb2.WorkerLoad(**{"state": "ready", **load}))  # type: ignore[arg-type]
        return self


def worker() -> WorkerState:
    description = WorkerDescription(
        worker_id=KEY.worker_id,
        pool="decode",
        incarnation=KEY.incarnation,
        address="127.0.0.1:1",
        node_id="n",
        pid=1,
    )
    return WorkerState(description, PrefixIndex(), now_s=0.0)


def num_indexed(state: WorkerState) -> int:
    return state._index.num_entries(KEY)


def test_it_is_routable_once_synced_and_ready() -> None:
    state = worker()
    assert (state.state, state.view()) == ("starting", None)
    stream = Stream(state).synced()
    assert state.is_routable
    assert num_indexed(state) == 3
    stream.send(load=state_pb2.WorkerLoad(state="draining"))
    assert (state.state, state.is_routable) == ("draining", False)


def test_events_change_the_index_in_order() -> None:
    state = worker()
    stream = Stream(state).synced()
    stream.send(block_events=State.BlockEvents(removed=HASHES[:1], stored=HASHES[3:5]))
    assert num_indexed(state) == 4
    stream.send(block_events=State.BlockEvents(cleared=True, stored=HASHES[:1]))
    assert num_indexed(state) == 1


def test_a_gap_needs_a_resync_and_a_repeat_does_not() -> None:
    state = worker()
    stream = Stream(state).synced()
    stream.sequence -= 1
    assert stream.send(load=state_pb2.WorkerLoad(num_running=9)) is Change.NOTHING
    assert state.load is not None
    assert state.load.num_running == 0
    stream.sequence += 1
    with pytest.raises(ResyncNeededError):
        stream.send(load=state_pb2.WorkerLoad())


def test_a_stream_must_begin_with_its_hello() -> None:
    with pytest.raises(ResyncNeededError):
        Stream(worker()).send(load=state_pb2.WorkerLoad())


def test_another_process_is_refused() -> None:
    other = State.Hello(worker=common_pb2.WorkerRef(worker_id="decode-0", incarnation=8))
    with pytest.raises(WrongWorkerError):
        Stream(worker()).send(hello=other)


def test_a_broken_stream_scrubs_and_stops_routing_and_a_new_one_revives() -> None:
    state = worker()
    Stream(state).synced()
    state.disconnect(now_s=5.0)
    assert (state.state, state.is_routable, state.lost_at_s) == ("lost", False, 5.0)
    assert num_indexed(state) == 0
    Stream(state, now_s=6.0).synced()
    assert state.is_routable
    assert num_indexed(state) == 3


@pytest.mark.parametrize(
    ("age_s", "step_s", "silence_s", "is_silent"),
    [(0.0, 0.0, 1.9, False), (0.0, 0.0, 2.1, True), (0.0, 1.0, 3.9, False), (3.0, 1.0, 1.1, True)],
)
def test_silence_is_measured_against_the_predicted_step(
    age_s: float, step_s: float, silence_s: float, is_silent: bool
) -> None:
    state = worker()
    Stream(state).synced(heartbeat_age_s=age_s, predicted_step_s=step_s)
    assert state.is_silent(silence_s) is is_silent


def test_a_stuck_engine_is_lost_while_its_process_still_speaks() -> None:
    state, attempt = worker(), Attempt()
    stream = Stream(state).synced()
    state.attempts.add(attempt)
    stream.send(load=state_pb2.WorkerLoad(state="ready", heartbeat_age_s=1.5))
    assert state.is_routable
    assert state.is_silent(0.6)
    assert state.give_up(now_s=0.6)
    assert (state.state, state.is_connected, state.is_routable) == ("lost", True, False)
    assert attempt.reasons
    assert not state.give_up(now_s=0.7)
    stream.send(load=state_pb2.WorkerLoad(state="ready", heartbeat_age_s=2.5))
    assert not state.is_routable
    stream.send(load=state_pb2.WorkerLoad(state="ready"))
    assert state.is_routable


def test_while_its_tokens_arrive_a_silent_worker_gets_nothing_new_and_keeps_what_it_has() -> None:
    state, attempt = worker(), Attempt()
    Stream(state).synced()
    state.attempts.add(attempt)
    state.worked_at_s = 2.0
    assert state.give_up(now_s=2.5)
    assert not state.is_routable
    assert not attempt.reasons
    assert not state.give_up(now_s=3.9)
    assert not attempt.reasons
    state.give_up(now_s=4.1)
    assert attempt.reasons


def test_a_silent_process_is_disconnected() -> None:
    state = worker()
    Stream(state).synced()
    assert state.give_up(now_s=2.1)
    assert (state.is_connected, state.lost_at_s) == (False, 2.1)


def test_a_suspect_is_good_again_with_the_next_message() -> None:
    state = worker()
    stream = Stream(state).synced()
    state.suspect()
    assert not state.is_routable
    assert stream.send(block_events=State.BlockEvents()) is Change.ROUTING
    view = state.view()
    assert view is not None
    assert view.is_routable


def test_picks_count_until_a_report_can_know_of_them() -> None:
    state = worker()
    stream = Stream(state).synced()
    for pick_id in range(3):
        state.add_pick(pick_id, Pending(num_requests=1, num_tokens=10), now_s=1.0)
    state.acknowledge_pick(0)
    state.drop_pick(1)
    stream.now_s = 1.01
    stream.send(load=state_pb2.WorkerLoad(state="ready", num_running=1))
    view = state.view()
    assert view is not None
    assert (view.num_requests, view.num_tokens_ahead) == (2, 10)
    stream.now_s = 1.2
    stream.send(load=state_pb2.WorkerLoad(state="ready", num_running=2))
    assert state.num_picks == 0


def test_a_refusal_and_a_distrusted_link_last_until_the_next_load() -> None:
    state = worker()
    link = state_pb2.LinkStatus(peer_id="prefill-0", peer_incarnation=1, state="ready")
    stream = Stream(state).synced(links=[link])
    state.refuse()
    state.distrust_link(WorkerKey("prefill-0", 1))
    view = state.view()
    assert view is not None
    assert (view.has_refused, dict(view.links)) == (True, {})
    stream.send(load=state_pb2.WorkerLoad(state="ready", links=[link]))
    view = state.view()
    assert view is not None
    assert (view.has_refused, list(view.links)) == (False, [WorkerKey("prefill-0", 1)])


def test_only_ready_links_are_seen() -> None:
    states = ["connecting", "ready", "broken", "incompatible"]
    links = [
        state_pb2.LinkStatus(peer_id=f"prefill-{n}", peer_incarnation=1, state=text)
        for n, text in enumerate(states)
    ]
    state = worker()
    Stream(state).synced(links=links)
    view = state.view()
    assert view is not None
    assert list(view.links) == [WorkerKey("prefill-1", 1)]


def test_losing_the_worker_reaches_what_runs_there() -> None:
    state, attempt = worker(), Attempt()
    state.attempts.add(attempt)
    state.fail_attempts("frozen")
    assert attempt.reasons == ["frozen"]
