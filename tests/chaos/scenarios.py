"""Every scenario. The README beside this file says which row of the threats is which."""

import random

from tests.chaos.scenario import Scenario
from tests.chaos.scenarios_of_requests import CLIENTS, MESSAGES, STEPS
from tests.chaos.scenarios_of_workers import WORKERS

SCENARIOS = (*WORKERS, *STEPS, *MESSAGES, *CLIENTS)


def subset(seed: int, within_s: float) -> tuple[Scenario, ...]:
    """The core, and by lot of the others what a quiet machine does in that time; in their order."""
    others = [scenario for scenario in SCENARIOS if not scenario.is_core]
    random.Random(seed).shuffle(others)
    chosen = [scenario for scenario in SCENARIOS if scenario.is_core]
    for scenario in others:
        if sum(each.quiet_s for each in chosen) + scenario.quiet_s <= within_s:
            chosen.append(scenario)
    return tuple(scenario for scenario in SCENARIOS if scenario in chosen)
