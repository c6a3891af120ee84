"""The engine's thread over steps that are launched ahead: every stream in order, to its end."""

import asyncio
from collections.abc import Callable

import pytest

from engine.engine import Engine
from engine.engine_loop import EngineLoop
from engine.load import StepOutput
from engine.request import FinishReason, RequestOutput
from engine.request_stream import RequestStream
from tests.unit.engine.conftest import generate, make_request, random_prompt


@pytest.mark.parametrize("run_ahead", [True, False])
async def test_streams_stay_whole_while_some_are_ended_and_some_come(
    make_engine: Callable[..., Engine],
    make_paged_engine: Callable[..., Engine],
    *,
    run_ahead: bool,
):
    steps: list[StepOutput] = []
    loop = EngineLoop(make_paged_engine(run_ahead=run_ahead), on_step=steps.append)
    loop.start()

    async def listen(stream: RequestStream, *, leave_after: int = 99) -> list[RequestOutput]:
        outputs = []
        async for output in stream:
            outputs.append(output)
            if len(outputs) == leave_after:
                loop.abort(stream.request_id)
        return outputs

    prompts = {f"r{n}": random_prompt(5 + 7 * n) for n in range(6)}
    tasks = []
    for n, (name, prompt) in enumerate(prompts.items()):
        stream = await loop.submit(make_request(name, prompt, max_tokens=30))
        tasks.append(asyncio.create_task(listen(stream, leave_after=6 if n % 2 else 99)))
    reserved = await loop.reserve(make_request("from a peer", random_prompt(9)))
    assert len(reserved.block_ids) == 2
    loop.abort("from a peer")
    solo = make_engine(attention="torch")
    for (name, prompt), outputs in zip(prompts.items(), await asyncio.gather(*tasks), strict=True):
        tokens = [token for output in outputs for token in output.token_ids]
        position = len(prompt)
        for output in outputs:
            assert not output.token_ids or output.start_position == position
            position += len(output.token_ids)
        whole = generate(solo, make_request(name, prompt, max_tokens=30))
        reason = outputs[-1].finish_reason
        assert reason in {FinishReason.LENGTH, FinishReason.ABORT}
        assert tokens == (whole if reason is FinishReason.LENGTH else whole[: len(tokens)])
        assert all(output.finish_reason is None for output in outputs[:-1])
    counts = await loop.call(lambda engine: engine.block_counts())
    assert counts.used == 0
    await loop.call(lambda engine: engine.check_integrity())
    await loop.stop()
    told = [output for step in steps for output in step.outputs]
    assert sum(output.finish_reason is not None for output in told) == len(prompts) + 1
