from router.report import RequestReport
from router.request_metrics import RequestMetrics
from telemetry.metrics import Metrics
from telemetry.prometheus_sink import PrometheusSink


def report(*, cached_prefill: int = 0, first_token_s: float | None = 0.5) -> RequestReport:
    return RequestReport(
        request_id="r",
        num_prompt_tokens=100,
        cached_prefill=cached_prefill,
        computed=100 - cached_prefill,
        first_token_s=first_token_s,
        num_attempts=1,
        finish_reason="stop",
    )


def errors(sink: PrometheusSink) -> dict[str, float]:
    """What is exposed of predicted cache hits: counts by upper bound, sum and count."""
    name = "relevo_predicted_cached_tokens_error"
    return {
        sample.labels.get("le", sample.name.removeprefix(name)): sample.value
        for sample in sink.samples()
        if sample.name.startswith(name)
    }


def test_predicted_cached_tokens_are_compared_with_what_was_found() -> None:
    sink = PrometheusSink()
    subject = RequestMetrics(Metrics(sink))
    subject.ended(report(cached_prefill=64), None, 64)  # as predicted
    subject.ended(report(cached_prefill=32), None, 96)  # 64 fewer than predicted
    subject.ended(report(cached_prefill=96), None, 0)  # 96 more
    found = errors(sink)
    assert found["_count"] == 3.0
    assert [found[bound] for bound in ("-64.0", "-1.0", "0.0", "64.0")] == [1.0, 1.0, 2.0, 3.0]


def test_a_request_without_a_token_says_nothing_of_caches() -> None:
    sink = PrometheusSink()
    RequestMetrics(Metrics(sink)).ended(report(first_token_s=None), None, 64)
    assert not errors(sink)
