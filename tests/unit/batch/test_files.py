"""The two files of a batch."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batch.input_file import InputFile
from batch.output_file import OutputFile


def row(custom_id: str = "a", **fields: Any) -> dict[str, Any]:
    usual = {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": {"n": 1}}
    return {**usual, **fields}


def written(path: Path, *rows: Any) -> InputFile:
    lines = [each if isinstance(each, str) else json.dumps(each) for each in rows]
    path.write_text("\n".join(lines) + "\n")
    return InputFile(path)


def done(custom_id: str, *, status: int = 200) -> dict[str, Any]:
    return {
        "id": "batch_req_1",
        "custom_id": custom_id,
        "response": {"status_code": status},
        "error": None,
    }


def test_requests_are_read_in_order_and_empty_lines_skipped(tmp_path: Path) -> None:
    source = written(tmp_path / "in", row("a"), "", row("b", url="/v1/responses"))
    assert source.check() == {"a", "b"}
    assert [(line.custom_id, line.url, line.fault) for line in source.lines()] == [
        ("a", "/v1/completions", ""),
        ("b", "/v1/responses", ""),
    ]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([row("a"), "{"], "line 2: expected a JSON object with a custom_id"),
        ([row(custom_id="")], "line 1: expected"),
        (["[1]"], "line 1: expected"),
        ([row("a"), row("b"), row("a")], "line 3: custom_id 'a' is that of line 1 too"),
        ([], "has no requests"),
    ],
)
def test_every_request_needs_an_id_of_its_own(
    tmp_path: Path, rows: list[Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        written(tmp_path / "in", *rows).check()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"method": "GET"}, "method must be POST, got 'GET'"),
        ({"url": "/v1/files"}, "url must be one of"),
        ({"body": [1]}, "body must be an object, got list"),
        ({"body": {"stream": True}}, "body.stream must be left out"),
    ],
)
def test_what_cannot_be_sent_is_the_fault_of_its_line(
    tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    [line] = written(tmp_path / "in", row(**fields)).lines()
    assert message in line.fault


def test_an_output_is_gone_on_with(tmp_path: Path) -> None:
    path = tmp_path / "out"
    with OutputFile(path) as output:
        output.append(done("a"))
        output.append(done("b", status=400))
    with OutputFile(path) as output:
        assert output.done == {"a", "b"}
        assert output.num_failed == 1
        output.append(done("c"))
    assert [json.loads(line)["custom_id"] for line in path.open()] == ["a", "b", "c"]


@given(cut=st.integers(min_value=0, max_value=400))
@settings(max_examples=40, deadline=None)
def test_whatever_a_crash_left_no_line_is_torn_or_there_twice(
    tmp_path_factory: pytest.TempPathFactory, cut: int
) -> None:
    path = tmp_path_factory.mktemp("cut") / "out"
    with OutputFile(path) as output:
        for number in range(4):
            output.append(done(str(number)))
    path.write_bytes(path.read_bytes()[:cut])
    with OutputFile(path) as output:
        for number in range(4):
            if str(number) not in output.done:
                output.append(done(str(number)))
    assert [json.loads(line)["custom_id"] for line in path.open()] == ["0", "1", "2", "3"]


def test_two_processes_do_not_write_one_output(tmp_path: Path) -> None:
    with (
        OutputFile(tmp_path / "out"),
        pytest.raises(ValueError, match="another process writes"),
        OutputFile(tmp_path / "out"),
    ):
        pass


@pytest.mark.parametrize("text", ["hello", "hello\n", "[1]\n", '{"custom_id": "a"}\n' * 2])
def test_another_file_is_not_written_over(tmp_path: Path, text: str) -> None:
    path = tmp_path / "out"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"line [12]"), OutputFile(path):
        pass
    assert path.read_text() == text
