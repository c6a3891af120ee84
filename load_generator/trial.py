"""One contract against one server: each phase in turn, a report and a verdict of each."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from load_generator.client import Client
from load_generator.contract import Contract, Phase
from load_generator.plan import make_plan
from load_generator.report import PhaseReport, make_report
from load_generator.run import Run, Sender
from load_generator.target import Target
from load_generator.verdict import Check, check


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseResult:
    """A phase that was run."""

    report: PhaseReport
    checks: Sequence[Check]

    @property
    def is_met(self) -> bool:
        """Whether all of it holds."""
        return all(each.is_met for each in self.checks)

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        lines = [
            {"what": each.what, "limit": each.limit, "value": each.value, "met": each.is_met}
            for each in self.checks
        ]
        return {**self.report.to_dict(), "met": self.is_met, "checks": lines}


class Trial:
    """Sends a contract's phases; plans are made before anything is sent."""

    def __init__(self, contract: Contract, target: Target, *, may_kill: bool = False) -> None:
        self._contract = contract
        self._target = target
        self._may_kill = may_kill
        self._plans = {phase.title: make_plan(contract, phase) for phase in contract.phases}

    async def run(self, say: Callable[[str], None]) -> list[Run]:
        """All phases; TargetError where the server is not what the contract says."""
        contract, target = self._contract, self._target
        await target.check(contract)
        client = Client(
            target.url,
            path=contract.path,
            api_key=target.api_key,
            timeout_s=contract.request_timeout_s,
        )
        async with client:
            await self._warm_up(client)
            runs = []
            for phase in contract.phases:
                say(f"{phase.title}: {phase.requests} requests")
                runs.append(await self._run_phase(client, phase))
            return runs

    async def _run_phase(self, client: Client, phase: Phase) -> Run:
        sender = Sender(
            client,
            max_concurrency=phase.max_concurrency,
            is_closed=phase.arrivals == "closed",
            half_way=self._loss_of(phase),
        )
        return await sender.send(self._plans[phase.title])

    def _loss_of(self, phase: Phase) -> Callable[[], Awaitable[str]] | None:
        if not phase.lose_worker:
            return None
        pool = phase.lose_worker
        return lambda: self._target.lose_worker(pool, is_allowed=self._may_kill)

    async def _warm_up(self, client: Client) -> None:
        plan = self._plans[self._contract.phases[0].title][: self._contract.warm_up_requests]
        if plan:
            await Sender(client, is_closed=True).send(plan)


def judge(contract: Contract, runs: Sequence[Run]) -> list[PhaseResult]:
    """A report and a verdict of each phase."""
    results = []
    for phase, run in zip(contract.phases, runs, strict=True):
        slo = contract.slo_of(phase)
        report = make_report(phase.title, run, slo)
        results.append(PhaseResult(report=report, checks=check(report, slo)))
    return results
