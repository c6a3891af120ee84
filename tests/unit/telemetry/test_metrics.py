"""The metrics table, the facade that never raises, and the page."""

import logging

import pytest
from prometheus_client.parser import text_string_to_metric_families

from telemetry import exposition, metrics
from telemetry.metrics import INSTRUMENTS, InstrumentKind, Metrics, Sample
from telemetry.prometheus_sink import PrometheusSink

FIXED_NAMES = {
    "relevo_requests_running",
    "relevo_requests_waiting",
    "relevo_requests_transferring",
    "relevo_kv_blocks",
    "relevo_requests_finished_total",
    "relevo_time_to_first_token_seconds",
    "relevo_ttft_part_seconds",
    "relevo_inter_token_latency_seconds",
    "relevo_request_duration_seconds",
    "relevo_prompt_tokens_total",
    "relevo_generation_tokens_total",
    "relevo_kv_transfer_bytes_total",
    "relevo_kv_transfer_seconds",
    "relevo_kv_transfer_failures_total",
    "relevo_lease_expired_total",
    "relevo_migrations_total",
    "relevo_admission_rejected_total",
    "relevo_preemptions_total",
    "relevo_kv_digest_mismatches_total",
    "relevo_kv_fenced_messages_total",
    "relevo_kv_leases_open",
    "relevo_predicted_cached_tokens_error",
}
OTHER_NAMES = {
    "relevo_workers_target",
    "relevo_workers_demand",
    "relevo_second_token_part_seconds",
    "relevo_router_waiting_requests",
    "relevo_workers",
    "relevo_links",
}


class BrokenSink:
    def add(self, *arguments):
        raise RuntimeError("disk full")

    set = observe = add


def worker_metrics():
    sink = PrometheusSink()
    return sink, Metrics(sink, labels={"pool": "decode", "worker": "decode-0"})


def value_of(sink, name, **labels):
    found = [each.value for each in sink.samples() if each[:2] == (name, labels)]
    assert len(found) == 1, sink.samples()
    return found[0]


def test_the_table_holds_exactly_the_names_outside_checks_rely_on():
    names = [each.name for each in INSTRUMENTS]
    assert set(names) == FIXED_NAMES | OTHER_NAMES
    assert len(names) == len(set(names))


@pytest.mark.parametrize("instrument", INSTRUMENTS, ids=lambda each: each.name)
def test_every_instrument_is_well_formed(instrument):
    is_counter = instrument.kind is InstrumentKind.COUNTER
    assert instrument.name.endswith("_total") == is_counter
    assert bool(instrument.buckets) == (instrument.kind is InstrumentKind.HISTOGRAM)
    assert list(instrument.buckets) == sorted(set(instrument.buckets))
    assert instrument.description
    assert not set(instrument.labels) & {"le", "request_id"}


@pytest.mark.parametrize("instrument", INSTRUMENTS, ids=lambda each: each.name)
def test_every_instrument_can_be_written_and_scraped(instrument):
    sink = PrometheusSink()
    labels = dict.fromkeys(instrument.labels, "x")
    writer = Metrics(sink)
    verbs = {"counter": writer.add, "gauge": writer.set, "histogram": writer.observe}
    verbs[instrument.kind](instrument.name, 1.0, **labels)
    (family,) = text_string_to_metric_families(sink.render().decode())
    assert family.type == instrument.kind.value
    assert all(each.name.startswith(instrument.name) for each in family.samples)
    assert f"# TYPE {instrument.name} {instrument.kind.value}\n" in sink.render().decode()


def test_a_counter_keeps_exactly_its_total_name_and_has_no_created_series():
    sink, writer = worker_metrics()
    writer.add(metrics.KV_TRANSFER_BYTES, 10)
    writer.add(metrics.KV_TRANSFER_BYTES, 5)
    assert sink.samples() == [
        Sample("relevo_kv_transfer_bytes_total", {"pool": "decode", "worker": "decode-0"}, 15.0)
    ]


def test_an_instrument_takes_only_the_constant_labels_it_has():
    sink, writer = worker_metrics()
    writer.add(metrics.PREEMPTIONS)
    writer.set(metrics.KV_BLOCKS, 7, state="free")
    writer.add(metrics.GENERATION_TOKENS)
    assert value_of(sink, "relevo_preemptions_total", worker="decode-0") == 1
    labels = {"pool": "decode", "worker": "decode-0", "state": "free"}
    assert value_of(sink, "relevo_kv_blocks", **labels) == 7
    assert value_of(sink, "relevo_generation_tokens_total") == 1


def test_samples_carry_the_buckets_of_a_histogram():
    sink, writer = worker_metrics()
    writer.observe(metrics.KV_TRANSFER_SECONDS, 0.003)
    who = {"pool": "decode", "worker": "decode-0"}
    assert value_of(sink, "relevo_kv_transfer_seconds_bucket", **who, le="0.0025") == 0
    assert value_of(sink, "relevo_kv_transfer_seconds_bucket", **who, le="0.005") == 1
    assert value_of(sink, "relevo_kv_transfer_seconds_bucket", **who, le="+Inf") == 1
    assert value_of(sink, "relevo_kv_transfer_seconds_count", **who) == 1
    assert value_of(sink, "relevo_kv_transfer_seconds_sum", **who) == 0.003


@pytest.mark.parametrize(
    "write",
    [
        lambda writer: writer.add("no_such_metric"),
        lambda writer: writer.add(metrics.GENERATION_TOKENS, -1),
        lambda writer: writer.add(metrics.KV_BLOCKS, 1, state="free"),  # a gauge
        lambda writer: writer.set(metrics.KV_BLOCKS, 1),  # a label is missing
        lambda writer: writer.observe(metrics.TTFT_PART, 1, part="queue", extra="x"),
        lambda writer: writer.observe(metrics.TIME_TO_FIRST_TOKEN, "soon"),
    ],
)
def test_a_wrong_call_is_logged_and_never_raises(write, caplog):
    _, writer = worker_metrics()
    write(writer)
    assert [each.levelno for each in caplog.records] == [logging.ERROR]


def test_samples_of_some_metrics_leave_out_the_others():
    sink, writer = worker_metrics()
    writer.set(metrics.KV_LEASES_OPEN, 1)
    writer.observe(metrics.REQUEST_DURATION, 1)
    writer.add(metrics.GENERATION_TOKENS, 2)
    told = sink.samples({metrics.GENERATION_TOKENS, metrics.MIGRATIONS})
    assert told == [Sample("relevo_generation_tokens_total", {}, 2.0)]
    assert len(sink.samples()) > 20


def test_a_series_is_the_same_whatever_the_order_of_its_labels():
    sink, _ = worker_metrics()
    sink.set(metrics.WORKERS, 1, {"pool": "decode", "state": "lost"})
    sink.set(metrics.WORKERS, 2, {"state": "lost", "pool": "decode"})
    assert value_of(sink, metrics.WORKERS, pool="decode", state="lost") == 2


def test_a_broken_sink_is_logged_once_per_metric(caplog):
    writer = Metrics(BrokenSink())
    for _ in range(3):
        writer.add(metrics.GENERATION_TOKENS)
        writer.set(metrics.KV_LEASES_OPEN, 1)
        writer.observe(metrics.REQUEST_DURATION, 1)
    assert len(caplog.records) == 3


def test_one_page_merges_the_samples_of_several_processes():
    first, writer = worker_metrics()
    writer.set(metrics.REQUESTS_RUNNING, 1)
    writer.observe(metrics.KV_TRANSFER_SECONDS, 1.0)
    second = PrometheusSink()
    Metrics(second, labels={"pool": "prefill", "worker": "prefill-0"}).set(
        metrics.REQUESTS_RUNNING, 2
    )
    page = exposition.render([*first.samples(), *second.samples()]).decode()
    families = {each.name: each for each in text_string_to_metric_families(page)}
    assert page.count("# TYPE relevo_requests_running ") == 1
    running = families["relevo_requests_running"].samples
    assert {each.labels["worker"]: each.value for each in running} == {
        "decode-0": 1,
        "prefill-0": 2,
    }
    assert families["relevo_kv_transfer_seconds"].type == "histogram"


def test_the_page_leaves_out_unknown_names_and_escapes_labels():
    samples = [
        Sample("relevo_from_the_future_total", {}, 1.0),
        Sample("relevo_migrations_total", {"cause": 'a "b"\\\nc'}, 1.0),
        Sample("relevo_generation_tokens_total", {}, 1.0),
        Sample("relevo_generation_tokens_total", {}, 2.0),
        Sample("relevo_requests_finished_total_count", {}, 2.0),  # no histogram of that name
    ]
    page = exposition.render(samples).decode()
    families = list(text_string_to_metric_families(page))
    assert [each.name for each in families] == ["relevo_migrations", "relevo_generation_tokens"]
    assert families[0].samples[0].labels == {"cause": 'a "b"\\\nc'}
    assert [each.value for each in families[1].samples] == [2.0]
