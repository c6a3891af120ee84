"""Each scenario on one live cluster; in the long form all, else a seeded subset within a minute."""

import random

import pytest

from tests.chaos.checks import ALWAYS
from tests.chaos.cluster import LiveCluster
from tests.chaos.conftest import SEED, SOAK_MINUTES
from tests.chaos.report import Report
from tests.chaos.scenario import Scenario, Stage, Truths
from tests.chaos.scenarios import SCENARIOS, subset

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.soak,
    pytest.mark.timeout(900),
    pytest.mark.asyncio(loop_scope="package"),
]

SHORT_WITHIN_S = 45.0  # with the other files of this folder: a minute
CHOSEN = SCENARIOS if SOAK_MINUTES else subset(SEED, SHORT_WITHIN_S)


@pytest.mark.parametrize("scenario", CHOSEN, ids=lambda scenario: scenario.name)
async def test_scenario(
    scenario: Scenario,
    cluster: LiveCluster,
    truths: Truths,
    rng: random.Random,
    report: Report,
) -> None:
    stage = Stage(scenario, cluster, rng, truths)
    try:
        await stage.run()
        for check in (*ALWAYS, *scenario.checks):
            await check(stage)
    finally:
        report.add(stage)
