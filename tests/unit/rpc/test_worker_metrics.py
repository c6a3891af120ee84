"""The series a worker reports."""

from engine.load import BlockCounts, EngineLoad
from rpc.worker_metrics import WorkerMetrics
from telemetry import metrics


def make_load(*, num_preemptions: int = 0) -> EngineLoad:
    return EngineLoad(
        num_running=3,
        num_waiting=2,
        num_waiting_for_kv=1,
        num_held_requests=0,
        num_waiting_uncached_tokens=10,
        blocks=BlockCounts(free=1, cached=2, used=3, held=4, quarantined=0, total=10),
        prefill_tokens_per_s=100.0,
        step_s=0.01,
        num_preemptions=num_preemptions,
    )


def read(worker_metrics: WorkerMetrics) -> dict[tuple[str, str], float]:
    return {
        (each.name, each.labels.get("state", each.labels.get("reason", ""))): each.value
        for each in worker_metrics.samples()
    }


def test_each_series_names_its_worker_and_says_what_the_load_says() -> None:
    worker_metrics = WorkerMetrics(pool="decode", worker_id="decode-0")
    worker_metrics.set_load(make_load(num_preemptions=2), num_transferring=5)
    values = read(worker_metrics)
    assert values[metrics.REQUESTS_RUNNING, ""] == 3
    assert values[metrics.REQUESTS_TRANSFERRING, ""] == 5
    assert values[metrics.KV_BLOCKS, "held"] == 4
    assert values[metrics.PREEMPTIONS, ""] == 2
    assert all(each.labels["worker"] == "decode-0" for each in worker_metrics.samples())


def test_totals_counted_elsewhere_are_added_once() -> None:
    worker_metrics = WorkerMetrics(pool="decode", worker_id="decode-0")
    for total in (3, 3, 5):
        worker_metrics.raise_to(metrics.KV_TRANSFER_BYTES, total)
        worker_metrics.raise_each_to(metrics.KV_TRANSFER_FAILURES, "reason", {"timeout": total})
    values = read(worker_metrics)
    assert values[metrics.KV_TRANSFER_BYTES, ""] == 5
    assert values[metrics.KV_TRANSFER_FAILURES, "timeout"] == 5
