"""One contract against one server: each phase in turn, a report and a verdict of each."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from load_generator.client import Client
from load_generator.contract import Contract, Phase
from load_generator.plan import make_plan
from load_generator.report import PhaseReport, make_report
from load_generator.run import Sender
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
    """Runs a contract; plans are made before anything is sent."""

    def __init__(self, contract: Contract, target: Target, *, may_kill: bool = False) -> None:
        self._contract = contract
        self._target = target
        self._may_kill = may_kill
        self._plans = {phase.title: make_plan(contract, phase) for phase in contract.phases}

    async def run(self, say: Callable[[str], None]) -> list[PhaseResult]:
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
            results = []
            for phase in contract.phases:
                say(f"{phase.title}: {phase.requests} requests")
                results.append(await self.run_phase(client, phase))
            return results

    async def run_phase(self, client: Client, phase: Phase) -> PhaseResult:
        """One phase."""
        sender = Sender(
            client,
            max_concurrency=phase.max_concurrency,
            is_closed=phase.arrivals == "closed",
            half_way=self._loss_of(phase),
        )
        run = await sender.send(self._plans[phase.title])
        slo = self._contract.slo_of(phase)
        report = make_report(phase.title, run, slo)
        return PhaseResult(report=report, checks=check(report, slo))

    def _loss_of(self, phase: Phase) -> Any:
        if not phase.lose_worker:
            return None
        return lambda: self._target.lose_worker(phase.lose_worker, is_allowed=self._may_kill)

    async def _warm_up(self, client: Client) -> None:
        plan = self._plans[self._contract.phases[0].title]
        await Sender(client, is_closed=True).send(plan[: self._contract.warm_up_requests])
