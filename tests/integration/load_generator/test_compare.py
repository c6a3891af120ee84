"""The comparison of servers: the same work for each, and what is said when it was not the same."""

import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

import psutil
import pytest

from bench.compare import Results, compare, draw, mismatches, summary, to_json
from bench.peer_server import PeerServer, ServerSpec, read_specs, running
from tests.fake_openai_server import FakeOpenAIServer, serving

WORK = ("W1", "W2", "W3", "W4", "W5")


def until(is_true: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 30.0
    while not is_true():
        assert time.monotonic() < end_s
        time.sleep(0.01)


async def run(*fakes: FakeOpenAIServer, work: tuple[str, ...] = WORK) -> Results:
    async with AsyncExitStack() as stack:
        servers = []
        for number, fake in enumerate(fakes):
            await stack.enter_async_context(serving(fake))
            spec = ServerSpec(url=fake.url)
            servers.append(PeerServer(f"s{number}", spec))
        return await compare(servers, work, rounds=2, scale=0.02)


async def test_every_server_gets_the_same_work_in_turn(tmp_path: Path) -> None:
    first, second = FakeOpenAIServer(step_s=0.02), FakeOpenAIServer(step_s=0.08)
    results = await run(first, second)
    others = [
        sorted(each["prompt"] for each in fake.bodies if each["max_tokens"] != 1)
        for fake in (first, second)
    ]
    assert others[0] == others[1]
    assert mismatches(results) == []
    table = summary(results)
    assert set(table) == set(WORK)
    assert table["W1"]["tpot_ms"]["s1"]["ratio"] > 1.1
    assert table["W1"]["tokens_per_s"]["s0"]["ratio"] == 1.0
    assert set(table["W5"]) == {"itl_p50_ms", "itl_p99_ms", "long_ttft_ms", "tokens_per_s"}
    assert table["W5"]["long_ttft_ms"]["s0"]["median"] > 0
    kept = json.loads(to_json(results))
    assert len(kept["rounds"]["W2"]["s0"]) == 2
    assert kept["rounds"]["W2"]["s0"][0]["output_tokens"] == 16
    draw({"W4": results["W4"]}, tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes()[:4] == b"\x89PNG"


async def test_shared_prefixes_are_computed_before_they_are_measured() -> None:
    server = FakeOpenAIServer()
    await run(server, work=("W3",))
    kept = server.bodies[-17:]
    prefixes = {tuple(body["prompt"][:20]) for body in kept}
    assert len(prefixes) == 1
    assert len({tuple(body["prompt"]) for body in kept}) == 17
    assert kept[0]["max_tokens"] == 1


async def test_a_server_that_was_frozen_before_runs_from_its_own_turn_on() -> None:
    """Earlier it would slow the start of others; frozen it would not say what it serves."""
    process = psutil.Popen(["sleep", "60"])
    process.suspend()
    until(lambda: process.status() == psutil.STATUS_STOPPED)
    seen: dict[str, bool] = {}

    class Watching(PeerServer):
        def wait_until_ready(self) -> str:
            seen[self.name] = process.status() == psutil.STATUS_STOPPED
            return super().wait_until_ready()

    try:
        async with serving(FakeOpenAIServer()) as fake:
            starting = Watching("starting", ServerSpec(url=fake.url))
            spec = ServerSpec(url=fake.url, pids=[process.pid], freeze=True)
            await compare([starting, Watching("frozen", spec)], ["W4"], rounds=1, scale=0.01)
        assert seen == {"starting": True, "frozen": False}
        until(lambda: process.status() == psutil.STATUS_STOPPED)
    finally:
        process.kill()
        process.wait()


async def test_other_work_is_told() -> None:
    class Doubling(FakeOpenAIServer):
        def _usage(self, body: dict[str, object]) -> dict[str, object]:
            told = super()._usage(body)
            return {**told, "prompt_tokens": 2 * told["prompt_tokens"]}

    found = mismatches(await run(FakeOpenAIServer(), Doubling(), work=("W1",)))
    assert found == ["W1: prompt_tokens of s0 3, of s1 6"]
    refusing = FakeOpenAIServer(verdict=lambda _: 400)
    assert any("refused with 400" in line for line in mismatches(await run(refusing, work=("W4",))))


def test_a_file_of_servers_is_checked(tmp_path: Path) -> None:
    path = tmp_path / "servers.yaml"
    path.write_text("a: {url: 'http://x', command: y}")
    with pytest.raises(ValueError, match="a: give either url or command"):
        read_specs(path)
    path.write_text("a: {urll: 'http://x'}")
    with pytest.raises(ValueError, match=r"a\.urll"):
        read_specs(path)


def test_the_shipped_file_of_servers_can_be_read() -> None:
    specs = read_specs(Path(__file__).resolve().parents[3] / "bench/servers.yaml")
    assert {"relevo", "relevo-pd", "vllm", "llama"} <= set(specs)


def test_a_server_is_started_frozen_and_ended(tmp_path: Path) -> None:
    spec = ServerSpec(
        command=f"{sys.executable} -m http.server {{port}} --bind 127.0.0.1",
        environment={"BESIDE": "{env[PATH]}/x"},
        freeze=True,
    )
    with running("web", spec, tmp_path) as server:
        [child] = [each for each in psutil.Process().children() if "http.server" in each.cmdline()]
        until(lambda: child.environ().get("BESIDE") == f"{os.environ['PATH']}/x")
        server.freeze()
        until(lambda: child.status() == psutil.STATUS_STOPPED)
        server.thaw()
        until(lambda: child.status() != psutil.STATUS_STOPPED)
        server.freeze()  # one that is frozen ends, too
    assert not psutil.pid_exists(child.pid)


def test_a_server_that_ends_is_not_waited_for(tmp_path: Path) -> None:
    spec = ServerSpec(command=f"{sys.executable} -c pass")
    with (
        running("gone", spec, tmp_path) as server,
        pytest.raises(RuntimeError, match="did not become ready"),
    ):
        server.wait_until_ready()


def test_a_process_that_ignores_the_end_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cluster.server_process.END_WITHIN_S", 0.2)
    deaf = tmp_path / "deaf"
    code = (
        "import pathlib,signal,time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        f" pathlib.Path('{deaf}').touch(); time.sleep(60)"
    )
    spec = ServerSpec(command=f'{sys.executable} -c "{code}"')
    with running("deaf", spec, tmp_path) as server:
        assert server.url
        until(deaf.exists)
        pid = next(p.pid for p in psutil.Process().children() if code in p.cmdline())
    assert not psutil.pid_exists(pid)
