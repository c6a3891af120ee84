from pathlib import Path

import pytest

from sim.synthetic import Shape, make_trace
from sim.trace import Trace, TraceRequest, ideal_hit_rate, read_trace

MOONCAKE = """\
{"timestamp": 0, "input_length": 1000, "output_length": 5, "hash_ids": [0, 1]}
{"timestamp": 3000, "input_length": 1600, "output_length": 50, "hash_ids": [0, 1, 2, 3]}
"""
AZURE = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:05.0319600,3180,8
"""


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_mooncake_lines_are_read(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path / "a.jsonl", MOONCAKE))
    assert [each.arrived_s for each in trace.requests] == [0.0, 3.0]
    assert trace.requests[1] == TraceRequest(
        arrived_s=3.0, num_prompt_tokens=1600, num_output_tokens=50, block_ids=(0, 1, 2, 3)
    )
    # Only the first block of the first request is full.
    assert ideal_hit_rate(trace) == 1024 / 2600


def test_azure_lines_are_read(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path / "a.csv", AZURE))
    gap_s = trace.requests[1].arrived_s - trace.requests[0].arrived_s
    assert gap_s == pytest.approx(1.052)
    assert (trace.requests[0].num_prompt_tokens, trace.requests[0].num_output_tokens) == (4808, 10)
    assert ideal_hit_rate(trace) == 0.0


def test_a_trace_is_played_at_another_rate(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path / "a.jsonl", MOONCAKE)).at_rate(2.0)
    assert [each.arrived_s for each in trace.requests] == [0.0, 0.5]
    assert trace.rate == 2.0
    assert [each.arrived_s for each in trace.at_rate(float("inf")).requests] == [0.0, 0.0]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.txt", "", "expected a .jsonl or .csv"),
        ("a.jsonl", MOONCAKE + '{"timestamp": 1}\n', "line 3: expected timestamp"),
        ("a.jsonl", "no json\n", "line 1"),
        ("a.csv", AZURE + "yesterday,1,2\n", "line 4: expected TIMESTAMP"),
        ("a.jsonl", "", "at least 2"),
        ("a.jsonl", MOONCAKE.splitlines()[0], "a has 1 requests but at least 2"),
        ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n", "at least 2"),
        ("a.csv", "time,tokens\n1,2\n", "line 2: expected TIMESTAMP"),
        ("a.csv", AZURE + "2023-11-16 18:17:09.1,-5,8\n", "line 4: .* below 0"),
        ("a.jsonl", MOONCAKE + MOONCAKE.replace("1000", "-1000"), "line 3: .* below 0"),
        ("a.jsonl", MOONCAKE + MOONCAKE.replace("[0, 1]", '"01"'), "line 3: expected .* hash_ids"),
        ("a.jsonl", MOONCAKE + MOONCAKE.replace("[0, 1]", "[0, 1.5]"), "line 3: expected"),
        ("a.jsonl", MOONCAKE + MOONCAKE.replace("0,", "null,", 1), "line 3: expected timestamp"),
        ("a.jsonl", MOONCAKE + "[1]\n", "line 3: expected timestamp"),
    ],
)
def test_a_bad_trace_is_refused_with_the_place(
    tmp_path: Path, name: str, text: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        read_trace(write(tmp_path / name, text))


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan")])
def test_no_rate_is_refused(rate: float, tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path / "a.jsonl", MOONCAKE))
    with pytest.raises(ValueError, match="expected more than 0"):
        trace.at_rate(rate)
    at_once = trace.at_rate(float("inf"))
    assert at_once.at_rate(float("inf")) == at_once
    with pytest.raises(ValueError, match="at one moment"):
        at_once.at_rate(2.0)


def test_what_is_no_text_is_no_trace(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=r"a\.csv is no text"):
        read_trace(tmp_path / "a.csv")


def test_a_missing_trace_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nowhere\.csv cannot be read"):
        read_trace(tmp_path / "nowhere.csv")


def made(seed: int, num_requests: int = 500) -> Trace:
    return make_trace(Shape(num_requests=num_requests), seed=seed)


def test_a_made_up_trace_is_the_same_for_the_same_seed() -> None:
    assert made(3) == made(3)
    assert made(3) != made(4)


def test_a_made_up_trace_has_the_shape_of_recorded_ones() -> None:
    trace = made(1, 2000)
    requests = trace.requests
    assert len(requests) == 2000
    assert [r.arrived_s for r in requests] == sorted(r.arrived_s for r in requests)
    assert 6.0 < trace.rate < 13.0
    assert 0.3 < ideal_hit_rate(trace) < 0.7  # the recorded ones: 0.37 and 0.64
    assert all(len(r.block_ids) == -(-r.num_prompt_tokens // 512) for r in requests)
    lengths = sorted(r.num_prompt_tokens for r in requests)
    assert lengths[1000] < 10_000 < lengths[-20]  # most are short, a few are long


def test_the_first_request_of_a_recorded_day_comes_at_the_start(tmp_path: Path) -> None:
    file = tmp_path / "azure.csv"
    rows = ["2023-11-16 18:17:03.9799600,4808,10", "2023-11-16 18:17:04.9799600,3180,8"]
    file.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]) + "\n")
    assert [each.arrived_s for each in read_trace(file).requests] == [0.0, 1.0]
