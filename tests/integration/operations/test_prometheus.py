"""A real Prometheus scrapes a live cluster: every panel has data, the alerts are sound."""

import asyncio
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from api.ingress import Ingress
from cluster.server_process import free_ports
from telemetry import grafana
from tests.integration.api.test_whole_path import BODY, quiescent
from tests.programs import require_program

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PROMETHEUS = Path(__file__).resolve().parents[3] / "deploy" / "prometheus"
GAUGES = (
    "relevo_requests_running",
    "relevo_requests_waiting",
    "relevo_requests_transferring",
    "relevo_router_waiting_requests",
)


@asynccontextmanager
async def scraping(folder: Path, port: int) -> AsyncIterator[httpx.AsyncClient]:
    """A Prometheus with our own configuration, but for the address and the pace."""
    config = yaml.safe_load((PROMETHEUS / "prometheus.yaml").read_text())
    config["global"] = {"scrape_interval": "500ms", "evaluation_interval": "500ms"}
    config["rule_files"] = [str(PROMETHEUS / "relevo-alerts.yaml")]
    config["scrape_configs"][0]["static_configs"][0]["targets"] = [f"127.0.0.1:{port}"]
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
    address = f"127.0.0.1:{free_ports(1)[0]}"
    process = start_prometheus(folder, address)
    try:
        async with httpx.AsyncClient(base_url=f"http://{address}", timeout=10) as client:
            yield client
    finally:
        process.terminate()
        process.wait(10)


def start_prometheus(folder: Path, address: str) -> subprocess.Popen[bytes]:
    arguments = [
        require_program("prometheus"),
        f"--config.file={folder / 'prometheus.yaml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={address}",
    ]
    with (folder / "prometheus.log").open("w") as log:
        return subprocess.Popen(arguments, stdout=log, stderr=log)


async def ask(prometheus: httpx.AsyncClient, query: str) -> list[dict[str, Any]]:
    """The series a query gives, as Grafana would ask."""
    whole = query.replace("$__rate_interval", "10s")
    try:
        answer = await prometheus.get("/api/v1/query", params={"query": whole})
    except httpx.TransportError:
        return []  # it still starts
    assert answer.status_code in {200, 503}, answer.text
    if answer.status_code == 503:
        return []
    found: list[dict[str, Any]] = answer.json()["data"]["result"]
    return [each for each in found if each["value"][1] != "NaN"]


async def test_every_panel_has_data_and_gauges_return_to_zero(
    ingress: Ingress, http: httpx.AsyncClient, tmp_path: Path
) -> None:
    async with scraping(tmp_path, ingress.http_port) as prometheus:
        queries = {
            (dashboard.title, title, query)
            for dashboard in grafana.DASHBOARDS
            for title, query in grafana.queries(grafana.render(dashboard))
        }
        deadline_s = time.monotonic() + 150
        while queries:
            assert time.monotonic() < deadline_s, sorted(queries)
            await asyncio.gather(
                *(http.post("/v1/completions", json={**BODY, "max_tokens": 4}) for _ in range(2))
            )
            ingress.serving.upstream.scale()  # as Serve asks it to
            queries = {each for each in queries if not await ask(prometheus, each[2])}
            await asyncio.sleep(0.2)
        rules = (await prometheus.get("/api/v1/rules")).json()["data"]["groups"][0]["rules"]
        assert {rule["health"] for rule in rules} <= {"ok", "unknown"}
        await quiescent(http)
        for gauge in GAUGES:
            await until_zero(prometheus, gauge)


async def until_zero(prometheus: httpx.AsyncClient, gauge: str) -> None:
    """Nothing more is sent: the worker itself says that it is idle."""
    deadline_s = time.monotonic() + 40
    while {each["value"][1] for each in await ask(prometheus, gauge)} != {"0"}:
        assert time.monotonic() < deadline_s, gauge
        await asyncio.sleep(0.2)


def test_promtool_finds_the_rules_sound() -> None:
    promtool = require_program("promtool")
    for arguments in (["rules", "relevo-alerts.yaml"], ["config", "prometheus.yaml"]):
        done = subprocess.run(
            [promtool, "check", *arguments],
            check=False,
            cwd=PROMETHEUS,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
