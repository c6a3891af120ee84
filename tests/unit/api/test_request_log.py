"""A line per request that can be replayed and quotes nothing."""

from pathlib import Path
from types import SimpleNamespace

import orjson
import pytest
from relevo.v1 import common_pb2

from api.operations.request_log import HASH_BLOCK_TOKENS, RequestLog
from router.report import RequestReport
from router.request import RoutedRequest
from sim.trace import read_trace
from telemetry.config import TelemetryConfig
from tests.fakes import FakeClock


def request(token_ids: list[int], *, salt: str = "", arrived_at: float = 0.0) -> RoutedRequest:
    return RoutedRequest(
        request_id="r",
        token_ids=token_ids,
        sampling=common_pb2.SamplingParams(),
        cache_salt=salt,
        request_label="label",
        arrived_at=arrived_at,
    )


def stream() -> SimpleNamespace:
    report = RequestReport(
        request_id="r", num_prompt_tokens=3, queue_s=0.1, wire_s=0.2, first_token_s=0.3
    )
    return SimpleNamespace(
        num_tokens=7, report=report, choices=[SimpleNamespace(finish_reason="stop")]
    )


def lines(path: Path) -> list[dict[str, object]]:
    return [orjson.loads(line) for line in path.read_text().splitlines()]


def hash_ids(log: RequestLog, path: Path, *requests: RoutedRequest) -> list[list[int]]:
    for each in requests:
        log.write(each, stream())  # type: ignore[arg-type]
    return [each["hash_ids"] for each in lines(path)]  # type: ignore[misc]


def test_a_line_has_the_fields_of_a_mooncake_trace_and_the_parts(tmp_path: Path) -> None:
    path, clock = tmp_path / "log.jsonl", FakeClock()
    log = RequestLog(str(path), now=clock)
    log.write(request([1] * 1025, arrived_at=clock() + 2.5), stream())  # type: ignore[arg-type]
    (line,) = lines(path)
    assert (line["timestamp"], line["input_length"], line["output_length"]) == (2500, 1025, 7)
    assert len(line["hash_ids"]) == 3  # type: ignore[arg-type]
    assert (line["request_id"], line["label"], line["finish_reasons"]) == ("r", "label", ["stop"])
    assert sum(line["first_token_parts_s"].values()) == pytest.approx(0.3)  # type: ignore[attr-defined]


def test_equal_prefixes_have_equal_ids_and_nothing_else_does(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    log = RequestLog(str(path))
    prefix = list(range(HASH_BLOCK_TOKENS))
    first, longer, other, salted = hash_ids(
        log,
        path,
        request([*prefix, 1]),
        request([*prefix, 1, 2]),
        request([9, *prefix[1:], 1]),
        request([*prefix, 1], salt="tenant"),
    )
    assert first[0] == longer[0]
    assert len({*first, *longer, *other, *salted}) == 7


def test_another_ingress_gives_other_ids(tmp_path: Path) -> None:
    paths = (tmp_path / "a", tmp_path / "b")
    ids = [hash_ids(RequestLog(str(path)), path, request([1, 2, 3])) for path in paths]
    assert ids[0] != ids[1]


def test_the_simulator_replays_it(tmp_path: Path) -> None:
    path, clock = tmp_path / "log.jsonl", FakeClock()
    log = RequestLog(str(path), now=clock)
    for number in range(3):
        clock.advance(0.5)
        log.write(request([1] * 600 + [number], arrived_at=clock()), stream())  # type: ignore[arg-type]
    trace = read_trace(path)
    assert [each.arrived_s for each in trace.requests] == [0.0, 0.5, 1.0]
    assert {each.num_prompt_tokens for each in trace.requests} == {601}
    assert {each.num_output_tokens for each in trace.requests} == {7}
    first, *_, last = (each.block_ids for each in trace.requests)
    assert (first[0] == last[0], first[1] == last[1]) == (True, False)


def test_ingresses_of_one_machine_write_a_file_each() -> None:
    config = TelemetryConfig(request_log_file="/var/log/requests.jsonl", keep_traces=7)
    assert config.of_one("ingress-1") == TelemetryConfig(
        request_log_file="/var/log/requests.ingress-1.jsonl", keep_traces=7
    )
    assert TelemetryConfig().of_one("ingress-1") == TelemetryConfig()
