"""The long forms: many kills and freezes under a counted load, and minutes of random faults.

`make soak MINUTES=10 SEED=1`; `make test` leaves them out.
"""

import asyncio
import random
import time

import pytest

from tests.chaos.checks import ALWAYS, stalls_below
from tests.chaos.cluster import LiveCluster
from tests.chaos.conftest import SOAK_MINUTES
from tests.chaos.events import Freeze, Kill, Slow, Thaw, Wait
from tests.chaos.load import Load
from tests.chaos.report import Report, quantile, slope_per_hour
from tests.chaos.scenario import Scenario, Stage, Truths
from tests.chaos.soak import FootprintLog, RandomFaults, StrikeUntilAsked

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.soak,
    pytest.mark.timeout(0),
    pytest.mark.asyncio(loop_scope="package"),
    pytest.mark.skipif(not SOAK_MINUTES, reason="a long form: make soak"),
]

NUM_HIT = 20  # streams that must have been hit for a bound on their stalls to mean something
MAX_GROWTH_BYTES = 32 * 1024 * 1024  # of the ingress, over the settled part
MAX_GROWTH_FDS = 8

KILLS = Scenario(
    name="one of two decode workers is killed again and again",
    rows=["R1"],
    load=Load(num_clients=8, num_requests=100),
    events=[Slow("decode"), StrikeUntilAsked([Kill("decode"), Wait(2.0)])],
    checks=[stalls_below(4.0)],
)
FREEZES = Scenario(
    name="one of two decode workers freezes again and again",
    rows=["R3"],
    load=Load(num_clients=8, num_requests=100),
    events=[Slow("decode"), StrikeUntilAsked([Freeze("decode"), Wait(8.0), Thaw(), Wait(2.0)])],
    checks=[stalls_below(7.0)],
)


@pytest.mark.parametrize("scenario", [KILLS, FREEZES], ids=lambda scenario: scenario.name)
async def test_eight_clients_of_a_hundred_streams_lose_none(
    scenario: Scenario, cluster: LiveCluster, truths: Truths, rng: random.Random, report: Report
) -> None:
    stage = Stage(scenario, cluster, rng, truths)
    try:
        await stage.run()
        for check in (*ALWAYS, *scenario.checks):
            await check(stage)
        counted = [answer for answer in stage.answers if answer.label == scenario.load.label]
        assert len(counted) == 800
        assert all(answer.is_complete for answer in counted)
        assert len(stage.affected) >= NUM_HIT
    finally:
        report.add(stage)


async def test_minutes_of_random_faults_lose_nothing(
    cluster: LiveCluster, truths: Truths, rng: random.Random, report: Report
) -> None:
    scenario = Scenario(
        name=f"random faults for {SOAK_MINUTES:g} minutes",
        rows=["R20"],
        load=Load(num_clients=6),
        events=[Slow("decode"), RandomFaults(60.0 * SOAK_MINUTES)],
    )
    log, stage = FootprintLog(), Stage(scenario, cluster, rng, truths)
    following = asyncio.create_task(log.follow(cluster.ingress_pid()))
    before_s = await _latencies_s(stage)
    try:
        await stage.run()
        after_s = await _latencies_s(stage)
        for check in ALWAYS:
            await check(stage)
    finally:
        following.cancel()
        report.add(stage)
    settled = log.settled()
    rss = [(at_s, float(footprint.rss_bytes)) for at_s, footprint in settled]
    fds = [(at_s, float(footprint.num_fds)) for at_s, footprint in settled]
    report.lines.append(
        f"ingress over {len(log.samples)} samples: rss slope {slope_per_hour(rss) / 1e6:.1f} MB/h,"
        f" fd slope {slope_per_hour(fds):.1f}/h; p99 of a request alone"
        f" {quantile(before_s, 0.99):.2f} s before, {quantile(after_s, 0.99):.2f} s after"
    )
    hours = (settled[-1][0] - settled[0][0]) / 3600.0
    assert slope_per_hour(rss) * hours < MAX_GROWTH_BYTES
    assert slope_per_hour(fds) * hours < MAX_GROWTH_FDS


async def _latencies_s(stage: Stage, count: int = 20) -> list[float]:
    """Of requests one after the other on a cluster at rest."""
    await stage.cluster.until_whole()
    latencies_s = []
    for _ in range(count):
        started_at_s = time.monotonic()
        body = {"model": "tiny", "prompt": "Say hello", "max_tokens": 20, "ignore_eos": True}
        response = await stage.cluster.http.post("/v1/completions", json=body)
        assert response.is_success, response.text
        latencies_s.append(time.monotonic() - started_at_s)
    return latencies_s
