from typing import Any

from relevo.v1 import common_pb2, state_pb2

from router.prefix_index import PrefixIndex
from router.status import Readiness, build_status
from router.worker_state import WorkerState
from rpc.description import WorkerDescription

State = state_pb2.WatchStateResponse
READY = Readiness(is_ready=True, has_been_ready=True)


MEMORY = state_pb2.MemoryReport(weights_bytes=30, kv_bytes=20, buffer_bytes=10, max_concurrency=7)


def worker(worker_id: str, **load: Any) -> WorkerState:
    pool = worker_id.partition("-")[0]
    description = WorkerDescription(
        worker_id=worker_id, pool=pool, incarnation=1, address="a:1", node_id="n", pid=5
    )
    state = WorkerState(description, PrefixIndex(), now_s=0.0)
    ref = common_pb2.WorkerRef(worker_id=worker_id, incarnation=1)
    bodies = [
        State(hello=State.Hello(worker=ref, pool=pool, memory=MEMORY)),
        State(snapshot_chunk=State.SnapshotChunk(last=True)),
        State(load=state_pb2.WorkerLoad(**{"state": "ready", **load})),
    ]
    for sequence, message in enumerate(bodies):
        message.sequence = sequence
        state.apply(message, now_s=0.0)
    return state


def link(state: str, reason: str = "") -> state_pb2.LinkStatus:
    return state_pb2.LinkStatus(
        peer_id="prefill-0",
        peer_incarnation=1,
        state=state,
        reason=reason,
        generation=2,
        bandwidth_bytes_per_s=5,
        moved_bytes=40,
    )


def test_a_whole_cluster_is_ready() -> None:
    workers = [worker("prefill-0"), worker("decode-0", links=[link("ready")], num_running=2)]
    status = build_status(workers, READY, now_s=0.5)
    assert (status["state"], status["reasons"]) == ("ready", [])
    row = status["workers"][0]  # type: ignore[index]
    assert row == {
        "id": "decode-0",
        "pool": "decode",
        "pid": 5,
        "node": "n",
        "zone": "",
        "start_s": {},
        "state": "ready",
        "incarnation": 1,
        "running": 2,
        "waiting": 0,
        "transferring": 0,
        "heartbeat_age_s": 0.5,
        "kv": dict.fromkeys(("free", "cached", "used", "held", "quarantined", "total"), 0),
        "memory": {
            "weights_bytes": 30,
            "kv_bytes": 20,
            "buffer_bytes": 10,
            "max_concurrency": 7,
        },
        "links": [
            {
                "peer": "prefill-0",
                "distance": "node",
                "state": "ready",
                "generation": 2,
                "backend": "",
                "reason": "",
                "bandwidth_bytes_per_s": 5.0,
                "moved_bytes": 40,
            }
        ],
    }


def test_lost_redundancy_is_degraded_with_reasons() -> None:
    broken = worker("decode-0", links=[link("broken", "peer closed")])
    status = build_status([worker("prefill-0"), broken], READY, now_s=0.0)
    assert status["state"] == "degraded"
    assert "link prefill-0 -> decode-0 is broken: peer closed" in status["reasons"]  # type: ignore[operator]
    assert "prefill-0 has no ready link" in status["reasons"]  # type: ignore[operator]


def test_a_lost_worker_leaves_the_list_after_a_minute() -> None:
    lost, alive = worker("prefill-0", num_running=3), worker("decode-0")
    lost.disconnect(now_s=10.0)
    rows = build_status([lost, alive], READY, now_s=69.0)["workers"]
    [row] = [row for row in rows if row["id"] == "prefill-0"]  # type: ignore[attr-defined]
    assert (row["state"], row["running"], row["kv"]) == ("lost", 0, {})
    status = build_status([lost, alive], READY, now_s=71.0)
    assert len(status["workers"]) == 1  # type: ignore[arg-type]
    assert status["state"] == "ready"


def test_a_worker_that_drained_away_is_not_missed() -> None:
    gone = worker("prefill-0", state="draining")
    assert build_status([gone, worker("decode-0")], READY, now_s=0.0)["state"] == "degraded"
    gone.disconnect(now_s=1.0)
    assert build_status([gone, worker("decode-0")], READY, now_s=2.0)["state"] == "ready"


def test_without_a_choice_it_starts_or_is_unavailable() -> None:
    starting = Readiness(is_ready=False, has_been_ready=False)
    assert build_status([], starting, now_s=0.0)["state"] == "starting"
    gone = Readiness(is_ready=False, has_been_ready=True)
    assert build_status([], gone, now_s=0.0)["state"] == "unavailable"
