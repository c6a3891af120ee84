"""What an engine says reaches the event loop in order, and not with every step."""

import asyncio

from engine.load import BlockCounts, BlockEvents, EngineLoad, StepOutput, StepStats
from engine.request import FinishReason, RequestOutput
from rpc.engine_reporter import EngineReporter


class FakeEngine:
    def __init__(self) -> None:
        self.num_running = 0
        self.events = BlockEvents()

    def drain_block_events(self) -> BlockEvents:
        events, self.events = self.events, BlockEvents()
        return events

    def load(self) -> EngineLoad:
        return EngineLoad(
            num_running=self.num_running,
            num_waiting=0,
            num_waiting_for_kv=0,
            num_held_requests=0,
            num_waiting_uncached_tokens=0,
            blocks=BlockCounts(free=1, cached=0, used=0, held=0, quarantined=0, total=1),
            prefill_tokens_per_s=1.0,
            step_s=0.1,
            num_preemptions=0,
        )


def make_output(finish_reason: FinishReason | None) -> StepOutput:
    output = RequestOutput(
        request_id="a",
        start_position=0,
        token_ids=(),
        num_computed_tokens=0,
        num_cached_tokens=0,
        finish_reason=finish_reason,
    )
    return StepOutput(outputs=[output], stats=StepStats(num_tokens=1))


async def test_only_steps_that_change_something_are_reported() -> None:
    engine, seen, now = FakeEngine(), [], [0.0]
    reporter = EngineReporter(engine, on_report=seen.append, now=lambda: now[0])
    reporter.on_step(StepOutput(stats=StepStats(num_tokens=1)))  # the first is always due
    engine.num_running = 4
    reporter.on_step(StepOutput(stats=StepStats(num_tokens=1)))
    await asyncio.sleep(0)
    assert (len(seen), reporter.load.num_running) == (1, 0)

    reporter.on_step(make_output(FinishReason.STOP))
    await asyncio.sleep(0)
    assert (len(seen), reporter.load.num_running) == (2, 4)

    engine.events = BlockEvents(cleared=True)
    reporter.on_step(StepOutput(stats=StepStats(num_tokens=1)))
    await asyncio.sleep(0)
    assert seen[-1].cleared

    now[0] = 1.0
    reporter.on_step(StepOutput(stats=StepStats(num_tokens=1)))
    reporter.on_step(StepOutput())  # a turn that only ran verbs
    await asyncio.sleep(0)
    assert len(seen) == 5
