"""`relevo bench` against a server on a real socket."""

import asyncio
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from cluster.cli import app
from load_generator.target import Target
from tests.fake_openai_server import MODEL, FakeOpenAIServer, in_a_thread, serving

PHASES = [
    {"profile": "short-short", "requests": 12, "rate_per_s": 200, "output_tokens": 3},
    {"profile": "tenants", "requests": 12, "rate_per_s": 200, "output_tokens": 3},
    {"profile": "disturbed", "requests": 12, "rate_per_s": 200, "output_tokens": 6},
]


def bench(tmp_path: Path, contract: dict[str, Any], *arguments: str) -> tuple[int, str]:
    path = tmp_path / "contract.yaml"
    path.write_text(yaml.safe_dump(contract))
    result = CliRunner().invoke(app, ["bench", str(path), *arguments])
    return result.exit_code, result.output


def test_a_contract_that_is_met(tmp_path: Path) -> None:
    numbers = tmp_path / "numbers.json"
    slo = {"ttft_ms": {"p99": 5000}, "tpot_ms": {"p95": 5000}, "error_rate": 0.0}
    contract = {"model": MODEL, "revision": "main", "slo": slo, "phases": PHASES}
    with in_a_thread(FakeOpenAIServer(step_s=0.001)) as server:
        status, text = bench(tmp_path, contract, "--url", server.url, "--json", str(numbers))
    assert status == 0, text
    assert "contract met" in text
    [trial] = json.loads(numbers.read_text())["trials"].values()
    assert [phase["phase"] for phase in trial] == ["short-short", "tenants", "disturbed"]
    assert all(phase["met"] and phase["failed"] == 0 for phase in trial)
    assert trial[0]["completed"] == trial[0]["latencies"]["ttft_ms"]["count"] == 12
    assert trial[0]["server_parts_ms"]["queue_time"]["p50"] == 1.0
    assert trial[0]["wrong_token_counts"] == 0
    assert set(trial[1]["groups"]) <= {"interactive", "standard", "bulk"}
    assert trial[2]["cancelled"] >= 1
    assert trial[2]["events"] == ["no decode worker was killed: --may-kill was not given"]
    assert len(server.bodies) >= 2 + 3 * 12  # with the two that warm it up


def test_a_contract_that_is_not_met(tmp_path: Path) -> None:
    contract = {"model": MODEL, "slo": {"ttft_ms": {"p50": 5}}, "phases": PHASES[:1]}
    with in_a_thread(FakeOpenAIServer(first_token_s=0.05)) as server:
        options = ("--url", server.url, "--plots", str(tmp_path / "plots"))
        status, text = bench(tmp_path, contract, *options)
    assert status == 1
    assert "NOT MET" in text
    assert "contract NOT met" in text
    for name in ("latencies.png", "course.png"):
        assert (tmp_path / "plots" / name).read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "other"}, "serves fake, the contract wants other"),
        ({"revision": "v2"}, "serves revision 'main' of fake, the contract wants 'v2'"),
        ({"phases": []}, "contract: phases"),
    ],
)
def test_what_cannot_be_tried_is_one_line(
    tmp_path: Path, change: dict[str, Any], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with in_a_thread(FakeOpenAIServer()) as server:
        contract = {"model": MODEL, "phases": PHASES[:1], **change}
        status, text = bench(tmp_path, contract, "--url", server.url)
    assert status == 2
    assert message in text + capsys.readouterr().err
    assert server.bodies == []


def test_numbers_that_could_not_be_kept_are_not_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    contract = {"model": MODEL, "phases": PHASES[:1]}
    status, text = bench(tmp_path, contract, "--json", str(tmp_path / "none/numbers.json"))
    assert status == 2
    assert "none is no directory" in text + capsys.readouterr().err


def test_no_server_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    contract = {"model": MODEL, "phases": PHASES[:1]}
    status, text = bench(tmp_path, contract, "--url", "http://127.0.0.1:9")
    assert status == 2
    assert "does not answer" in text + capsys.readouterr().err


def test_two_servers_are_compared_in_turn(tmp_path: Path) -> None:
    numbers = tmp_path / "numbers.json"
    contract = {"model": MODEL, "slo": {"error_rate": 0.1}, "phases": PHASES[:1]}
    refusing, able = FakeOpenAIServer(verdict=lambda _: 500), FakeOpenAIServer()
    with in_a_thread(refusing), in_a_thread(able):
        urls = ("--url", refusing.url, "--url", able.url)
        status, text = bench(
            tmp_path, contract, "--compare", *urls, "--json", str(numbers), "--rounds", "2"
        )
    assert status == 0, text
    assert "separation pays for this contract: only disaggregated meets the contract" in text
    comparison = json.loads(numbers.read_text())["comparison"]
    assert comparison["verdict"] == "separation pays"
    rows = {row["what"]: row for row in comparison["rows"]}
    assert (rows["good share"]["aggregated"], rows["good share"]["disaggregated"]) == (0, 1)
    assert len(refusing.bodies) == len(able.bodies) == 2 * (2 + 12)


def test_a_comparison_needs_both_servers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    contract = {"model": MODEL, "phases": PHASES[:1]}
    status, text = bench(tmp_path, contract, "--compare", "--url", "http://127.0.0.1:9")
    assert status == 2
    assert "takes the url of an aggregated and of a disaggregated" in text + capsys.readouterr().err


async def lose(worker: dict[str, Any], *, is_allowed: bool = True) -> str:
    server = FakeOpenAIServer(
        workers=[{"id": "decode-0", "pool": "decode", "running": 1, **worker}]
    )
    async with serving(server):
        return await Target(server.url).lose_worker("decode", is_allowed=is_allowed)


@pytest.mark.parametrize("title", ["ray::ServeReplica:relevo:DecodeWorker", "decode_workers"])
async def test_a_worker_of_this_machine_is_killed(title: str) -> None:
    process = await asyncio.create_subprocess_exec(title, "60", executable="sleep")
    made_s = time.time() + 600  # by Ray, of a process that waited for work
    worker = {"pid": process.pid, "incarnation": round(made_s * 1e6)}
    assert "--may-kill was not given" in await lose(worker, is_allowed=False)
    assert process.returncode is None
    assert await lose(worker) == f"decode-0 (pid {process.pid}) was killed"
    assert await process.wait() == -9


async def test_a_process_that_only_has_the_number_is_left_alone() -> None:
    process = await asyncio.create_subprocess_exec("DecodeWorker", "60", executable="sleep")
    told = "no decode worker was killed: decode-0 is no process of this user on this machine"
    assert await lose({"pid": process.pid, "incarnation": 1}) == told  # is a later one
    assert await lose({"pid": os.getpid(), "incarnation": round(time.time() * 1e6)}) == told
    assert process.returncode is None
    process.kill()
    await process.wait()
    assert "tells of none" in await lose({"pool": "prefill"})
    gone = Target("http://127.0.0.1:9")
    assert "does not answer" in await gone.lose_worker("decode", is_allowed=True)
