"""A worker is lost at any token of any kind of request: the client's answer stays what it was.

The tiny model runs in float64, so an answer is compared whole: text, ids, logprobs, finish and
usage. `RELEVO_SOAK_MINUTES` makes the random rounds go on for that long.
"""

import asyncio
import os
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.asks import Answer, Ask, every_ask
from tests.gated_cluster import GatedCluster, Moment

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

NUM_ROUNDS = 2


class Cut:
    """Closes the gate of the worker that is about to tell a certain token, for a moment."""

    def __init__(
        self,
        cluster: GatedCluster,
        *,
        pool: str,
        label: str,
        offset: int | None = None,  # None: at the end
        open_after_s: float = 0.05,
    ) -> None:
        self._cluster = cluster
        self._pool = pool
        self._label = label
        self._offset = offset
        self._open_after_s = open_after_s
        self.struck: Moment | None = None

    def __call__(self, moment: Moment) -> None:
        is_there = moment.is_end if self._offset is None else moment.offset == self._offset
        if self.struck or not is_there or moment.label != self._label:
            return
        if not moment.worker_id.startswith(self._pool):
            return
        self.struck = moment
        gate = self._cluster.gates[moment.worker_id]
        gate.cut()
        asyncio.get_running_loop().call_later(self._open_after_s, gate.open)


@asynccontextmanager
async def struck(cluster: GatedCluster, *cuts: Cut) -> AsyncIterator[None]:
    def strike(moment: Moment) -> None:
        for cut in cuts:
            cut(moment)

    cluster.strikes.strike = strike
    try:
        yield
    finally:
        cluster.strikes.strike = lambda _: None


async def asks_and_answers(cluster: GatedCluster) -> tuple[list[Ask], list[Answer]]:
    """Every ask with its undisturbed answer; the stop string spans two tokens."""
    [letters] = [ask for ask in every_ask("??") if ask.label == "stop-http-whole"]
    text = (await letters.send(cluster.http, cluster.stub, salt="letters")).choices[0].text
    asks = every_ask(text[11:13])
    answers = [
        await ask.send(cluster.http, cluster.stub, salt=f"{ask.label}-alone") for ask in asks
    ]
    by_name = dict(zip((ask.label for ask in asks), answers, strict=True))
    assert by_name["stop-http-stream"].choices[0].text == text[:11]
    assert by_name["stop-http-stream"].choices[0].finish_reason == "stop"
    assert by_name["min_tokens-http-stream"].usage[1] == 10
    assert [by_name[f"{name}-http-stream"].usage[1] for name in ("one", "end at once")] == [1, 1]
    assert len({len(told.token_ids) for told in by_name["choices-http-whole"].choices.values()}) > 1
    for ask in asks:
        if ask.name not in {"best"}:
            others = [a for o, a in zip(asks, answers, strict=True) if o.name == ask.name]
            assert all(o.usage == others[0].usage for o in others), ask.label
    return asks, answers


SWEPT = ["plain-grpc-whole", "stop-http-stream", "choices-grpc-stream"]


async def test_cut_at_the_first_the_last_and_any_token_between(cluster: GatedCluster) -> None:
    asks, answers = await asks_and_answers(cluster)
    known = {ask.label: (ask, answer) for ask, answer in zip(asks, answers, strict=True)}
    for label in SWEPT:
        ask, expected = known[label]
        last = max(len(told.token_ids) for told in expected.choices.values()) - 1
        # The stop string lies in tokens 11 and 12: the second is lost with its worker.
        for offset in {0, 1, 12, last - 1, None}:
            cut = Cut(cluster, pool="decode", label=label, offset=offset)
            async with struck(cluster, cut):
                answer = await ask.send(cluster.http, cluster.stub, salt=f"{label}-{offset}")
            assert answer == expected, (label, offset)
            # A stop string found meanwhile may have ended the request before.
            assert cut.struck or ask.body.get("stop"), (label, offset)
            await cluster.until_ready()
    await cluster.until_quiet()


async def test_cut_before_during_and_after_the_hand_over(cluster: GatedCluster) -> None:
    asks, answers = await asks_and_answers(cluster)
    known = {ask.label: (ask, answer) for ask, answer in zip(asks, answers, strict=True)}
    for label in ("plain-http-stream", "choices-grpc-stream"):
        ask, expected = known[label]
        # Its progress, its first token, and long after it.
        for pool, offset in (("prefill", -1), ("prefill", 0), ("decode", 6)):
            cut = Cut(cluster, pool=pool, label=label, offset=offset)
            async with struck(cluster, cut):
                answer = await ask.send(cluster.http, cluster.stub, salt=f"{label}-{offset}")
            if offset < 0:
                # Lost before it told how much was cached: the attempt that told counts.
                answer.usage = (*answer.usage[:2], 0)
            assert answer == expected, (label, pool, offset)
            assert cut.struck, (label, pool, offset)
            await cluster.until_ready()
    await cluster.until_quiet()


async def test_with_nobody_left_requests_wait_for_a_worker_or_their_deadline(
    cluster: GatedCluster,
) -> None:
    asks = [ask for ask in every_ask("??") if ask.name in {"plain", "choices"}]
    expected = [await ask.send(cluster.http, cluster.stub, salt=f"{ask.label}-a") for ask in asks]
    decodes = [cluster.gates[f"decode-{n}"] for n in range(2)]
    is_cut = False

    def cut_all(moment: Moment) -> None:
        nonlocal is_cut
        if moment.offset == 6 and not is_cut:
            is_cut = True
            for gate in decodes:
                gate.cut()

    cluster.strikes.strike = cut_all
    answering = [
        asyncio.create_task(ask.send(cluster.http, cluster.stub, salt=f"{ask.label}-b"))
        for ask in asks
    ]
    await cluster.until(lambda: is_cut and not cluster.upstream.is_ready(), 30.0)
    body = {"model": "tiny", "prompt": "Nobody hears it."}
    headers = {"x-relevo-timeout-s": "0.3"}
    late = await cluster.http.post("/v1/completions", json=body, headers=headers)
    assert late.status_code == 503, late.text
    assert int(late.headers["retry-after"]) >= 1
    assert late.json()["error"]["message"]
    for gate in decodes:
        gate.open()
    answers = await asyncio.gather(*answering)
    for ask, answer, told in zip(asks, answers, expected, strict=True):
        answer.usage = (*answer.usage[:2], told.usage[2])
        assert answer == told, ask.label
    await cluster.until_ready()
    await cluster.until_quiet()


@pytest.mark.soak
@pytest.mark.timeout(0)
async def test_every_kind_of_request_at_once_and_workers_cut_at_random_tokens(
    cluster: GatedCluster,
) -> None:
    asks, answers = await asks_and_answers(cluster)
    minutes = float(os.environ.get("RELEVO_SOAK_MINUTES", "0"))
    seed = int(os.environ.get("RELEVO_SOAK_SEED", "1"))
    end_s, number = time.monotonic() + 60 * minutes, 0
    while number < NUM_ROUNDS or time.monotonic() < end_s:
        number += 1
        rng = random.Random(f"{seed}-{number}")
        cuts = [
            Cut(
                cluster,
                pool=rng.choice(["decode", "decode", "prefill"]),
                label=rng.choice(asks).label,
                offset=rng.randrange(-1, 20),
                open_after_s=rng.choice([0.0, 0.05, 0.3]),
            )
            for _ in range(3)
        ]
        async with struck(cluster, *cuts):
            got = await asyncio.gather(
                *(
                    ask.send(cluster.http, cluster.stub, salt=f"{number}-{ask.label}")
                    for ask in asks
                )
            )
        for ask, answer, expected in zip(asks, got, answers, strict=True):
            # A worker lost before it told of the prompt may have left it in a cache.
            *counts, cached = answer.usage
            assert tuple(counts) == expected.usage[:2], (seed, number, ask.label)
            assert cached < counts[0], (seed, number, ask.label)
            answer.usage = expected.usage
            assert answer == expected, (seed, number, ask.label)
        await cluster.until_ready()
        await cluster.until_quiet()
