"""`relevo batch` against a server on a real socket."""

import json
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from batch.input_file import InputFile
from batch.job import GaveUpError, Job
from batch.output_file import OutputFile
from batch.pacer import Pacer
from batch.sender import Sender
from cluster.cli import app
from tests.fake_openai_server import FakeOpenAIServer, in_a_thread, serving

RELEVO = Path(sys.executable).with_name("relevo")


def write_input(path: Path, count: int, **body: Any) -> Path:
    fields = {"model": "fake", "prompt": [1], "max_tokens": 3, **body}
    rows = [
        {"custom_id": f"r{n}", "method": "POST", "url": "/v1/completions", "body": fields}
        for n in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def answers(path: Path) -> dict[str, Any]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    counts = Counter(row["custom_id"] for row in rows)
    assert set(counts.values()) <= {1}
    return {row["custom_id"]: row for row in rows}


def batch(source: Path, output: Path, server: FakeOpenAIServer, *more: str) -> tuple[int, str]:
    result = CliRunner().invoke(
        app, ["batch", str(source), str(output), "--url", server.url, *more]
    )
    return result.exit_code, result.output


def test_a_batch_has_an_answer_for_each_request(tmp_path: Path) -> None:
    output = tmp_path / "out"
    with in_a_thread(FakeOpenAIServer()) as server:
        status, text = batch(write_input(tmp_path / "in", 30), output, server)
    assert status == 0, text
    rows = answers(output)
    assert set(rows) == {f"r{n}" for n in range(30)}
    row = rows["r7"]
    assert row["id"].startswith("batch_req_")
    assert row["error"] is None
    assert row["response"]["status_code"] == 200
    assert row["response"]["body"]["usage"]["completion_tokens"] == 3
    assert {body["priority"] for body in server.bodies} == {100}


def test_a_request_keeps_its_own_priority_and_none_is_sent_to_who_knows_none(
    tmp_path: Path,
) -> None:
    with in_a_thread(FakeOpenAIServer()) as server:
        batch(write_input(tmp_path / "a", 1, priority=7), tmp_path / "out-a", server)
        batch(write_input(tmp_path / "b", 1), tmp_path / "out-b", server, "--priority", "0")
    assert [body.get("priority") for body in server.bodies] == [7, None]


def test_what_fails_has_its_own_line_and_the_others_go_on(tmp_path: Path) -> None:
    source, output = write_input(tmp_path / "in", 3), tmp_path / "out"
    with source.open("a") as file:
        file.write(json.dumps({"custom_id": "odd", "method": "GET"}) + "\n")
    seen = iter([200, 400, 200])
    with in_a_thread(FakeOpenAIServer(verdict=lambda _: next(seen))) as server:
        status, _ = batch(source, output, server)
    assert status == 1
    rows = answers(output)
    assert rows["odd"]["error"]["code"] == "invalid_request"
    assert rows["odd"]["response"] is None
    statuses = [row["response"]["status_code"] for row in rows.values() if row["response"]]
    assert sorted(statuses) == [200, 200, 400]
    [bad] = [
        row
        for row in rows.values()
        if row["response"] and row["error"] is None and row["response"]["status_code"] == 400
    ]
    assert bad["response"]["body"]["error"]["message"] == "refused with 400"


def test_a_killed_batch_goes_on_where_it_was(tmp_path: Path) -> None:
    source, output = write_input(tmp_path / "in", 60), tmp_path / "out"
    server = FakeOpenAIServer(first_token_s=0.01)

    def answer_some(_: dict[str, Any]) -> int:
        """However late the kill comes, some are left for it."""
        server.first_token_s = 0.01 if len(server.bodies) <= 20 else 60.0
        return 200

    server.verdict = answer_some
    with in_a_thread(server):
        command = [str(RELEVO), "batch", str(source), str(output), "--url", server.url]
        process = subprocess.Popen([*command, "--max-concurrency", "2"], stderr=subprocess.DEVNULL)
        end_s = time.monotonic() + 45
        while not output.exists() or output.read_bytes().count(b"\n") < 5:
            assert time.monotonic() < end_s
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
        process.wait()
        with output.open("ab") as file:
            file.write(b'{"id":"batch_req_torn')
        before = output.read_bytes().count(b"\n")
        assert 5 <= before < 60
        server.verdict, server.first_token_s = lambda _: 200, 0.0
        status, text = batch(source, output, server)
    assert status == 0, text
    assert len(answers(output)) == 60
    # Of those that ran when it was killed nothing is known; no other one was asked twice.
    assert len(server.bodies) <= 62


async def run_job(tmp_path: Path, server: FakeOpenAIServer, count: int, **settings: Any) -> Job:
    source = InputFile(write_input(tmp_path / "in", count))
    with OutputFile(tmp_path / "out") as output:
        async with serving(server), Sender(server.url, priority=1, timeout_s=30) as sender:
            options = {"patience_s": 60.0, **settings}
            job = Job(source, output, sender, Pacer(32), **options)
            await job.run()
            return job


async def test_it_takes_the_room_there_is_and_no_more(tmp_path: Path) -> None:
    server = FakeOpenAIServer(first_token_s=0.01, retry_after="0.02")
    server.verdict = lambda _: 429 if server.num_running >= 6 else 200
    job = await run_job(tmp_path, server, 150)
    rows = answers(tmp_path / "out")
    assert len(rows) == 150
    assert all(row["response"]["status_code"] == 200 for row in rows.values())
    assert 4 <= server.most_running <= 6
    # Each refusal is a request that found no room: few, against those that were served.
    assert 1 <= job.num_refusals <= 40


async def test_an_error_of_the_server_is_tried_again_and_then_written_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("batch.job.PAUSE_S", 0.01)
    server = FakeOpenAIServer(verdict=lambda _: 500)
    await run_job(tmp_path, server, 1)
    assert len(server.bodies) == 4
    assert answers(tmp_path / "out")["r0"]["response"]["status_code"] == 500


async def test_it_gives_up_when_nothing_is_answered(tmp_path: Path) -> None:
    server = FakeOpenAIServer(verdict=lambda _: 503, retry_after="0.05")
    with pytest.raises(GaveUpError, match=r"nothing was answered for 0\.2 s, last: status 503"):
        await run_job(tmp_path, server, 10, patience_s=0.2)
    assert answers(tmp_path / "out") == {}


async def test_it_waits_as_long_as_others_are_served(tmp_path: Path) -> None:
    end_s = time.monotonic() + 0.5
    server = FakeOpenAIServer(retry_after="0.05")
    server.verdict = lambda _: 429 if time.monotonic() < end_s else 200
    await run_job(tmp_path, server, 3, patience_s=0.2)
    assert len(answers(tmp_path / "out")) == 3


def test_files_that_do_not_belong_together_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    output.write_text(json.dumps({"custom_id": "other", "response": {"status_code": 200}}) + "\n")
    status, text = batch(write_input(tmp_path / "in", 1), output, FakeOpenAIServer(url="http://x"))
    assert status == 2
    assert "has 'other', which" in text + capsys.readouterr().err
