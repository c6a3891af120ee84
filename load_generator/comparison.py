"""The same contract on two servers in turn, and whether the second one is the better for it."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from load_generator.contract import Contract
from load_generator.run import Run
from load_generator.target import Target
from load_generator.trial import PhaseResult, Trial, judge

TELLING_SHARE = 0.02  # of the requests; less than that is chance
TELLING_RATIO = 1.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Which of two servers a contract is for."""

    better: str  # its name; empty = neither
    reason: str


async def run_in_turn(
    contract: Contract,
    targets: Mapping[str, Target],
    *,
    rounds: int,
    may_kill: bool,
    say: Callable[[str], None],
) -> dict[str, list[PhaseResult]]:
    """A B A B: what the machine does meanwhile happens to both. Rounds are joined."""
    runs: dict[str, list[Run]] = {}
    for number in range(rounds):
        for name, target in targets.items():
            trial = Trial(contract, target, may_kill=may_kill)
            label = f"round {number + 1} {name} "
            new = await trial.run(lambda text, label=label: say(label + text))  # type: ignore[misc]
            old = runs.get(name)
            runs[name] = (
                new if old is None else [a.joined(b) for a, b in zip(old, new, strict=True)]
            )
    return {name: judge(contract, each) for name, each in runs.items()}


def decide(trials: Mapping[str, Sequence[PhaseResult]]) -> Decision:
    """By the contract first, then by goodput, then by the latencies it limits."""
    (first, one), (second, other) = trials.items()
    met = {first: _is_met(one), second: _is_met(other)}
    if met[first] != met[second]:
        better = first if met[first] else second
        return Decision(better=better, reason=f"only {better} meets the contract")
    both = "both meet" if met[first] else "neither meets"
    shares = {first: _good_share(one), second: _good_share(other)}
    if abs(shares[first] - shares[second]) > TELLING_SHARE:
        better = max(shares, key=shares.__getitem__)
        told = ", ".join(f"{name} {share:.1%}" for name, share in shares.items())
        return Decision(
            better=better, reason=f"{both} the contract; within its limits were {told} of requests"
        )
    ratio = _latency_ratio(one, other)
    told = (
        f"{both} the contract; {second}, the latencies it limits are {ratio:.2f} times what they"
        f" are {first}"
    )
    if 1 / TELLING_RATIO <= ratio <= TELLING_RATIO:
        return Decision(better="", reason=f"{told}: no difference")
    return Decision(better=second if ratio < 1 else first, reason=told)


def side_by_side(trials: Mapping[str, Sequence[PhaseResult]]) -> list[dict[str, Any]]:
    """For each phase and number: both values and the second over the first."""
    (first, one), (second, other) = trials.items()
    rows = []
    for ours, theirs in zip(one, other, strict=True):
        for what, value in _numbers(ours).items():
            beside = _numbers(theirs)[what]
            ratio = beside / value if value and beside is not None else None
            rows.append(
                {
                    "phase": ours.report.title,
                    "what": what,
                    first: value,
                    second: beside,
                    "ratio": ratio,
                }
            )
    return rows


def _numbers(result: PhaseResult) -> dict[str, float | None]:
    report = result.report
    latencies = report.latencies
    return {
        "good requests/s": report.goodput_per_s,
        "good share": report.good_share,
        "output tokens/s": report.output_tokens_per_s,
        "TTFT p50 ms": latencies.ttft_ms.at(50),
        "TTFT p99 ms": latencies.ttft_ms.at(99),
        "TPOT p50 ms": latencies.tpot_ms.at(50),
        "TPOT p99 ms": latencies.tpot_ms.at(99),
        "ITL p99 ms": latencies.itl_ms.at(99),
    }


def _is_met(results: Sequence[PhaseResult]) -> bool:
    return all(result.is_met for result in results)


def _good_share(results: Sequence[PhaseResult]) -> float:
    num_good = sum(result.report.num_good for result in results)
    return num_good / max(sum(result.report.num_judged for result in results), 1)


def _latency_ratio(one: Sequence[PhaseResult], other: Sequence[PhaseResult]) -> float:
    """Geometric mean over every limited latency; 1 where none can be compared."""
    ours = chain.from_iterable(result.checks for result in one)
    theirs = chain.from_iterable(result.checks for result in other)
    logs = [
        math.log(beside.value / check.value)
        for check, beside in zip(ours, theirs, strict=True)
        if "_ms" in check.what and check.value and beside.value
    ]
    return math.exp(sum(logs) / len(logs)) if logs else 1.0
