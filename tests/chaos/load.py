"""Clients that stream answers and write down everything that could be wrong with one."""

import asyncio
import itertools
import json
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

Json = dict[str, Any]

ASIDE = "aside"  # what no load asks for
# What a request asks for, by name. Each answer depends on its request alone.
_FOX = "The quick brown fox jumps over the lazy dog. "
QUESTIONS: dict[str, Json] = {
    "greedy": {"prompt": _FOX, "temperature": 0},
    "long prompt": {"prompt": _FOX * 6, "temperature": 0},
    "sampled": {"prompt": "Say hello to the world.", "temperature": 0.9, "top_p": 0.9, "seed": 7},
    "penalties": {
        "prompt": "In the beginning there was a block",
        "temperature": 0,
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.5,
        "min_tokens": 20,
    },
    "stop string": {"prompt": "A prefill worker reads", "temperature": 0, "stop": ["the", "qu"]},
    "two choices": {"prompt": "system user assistant", "temperature": 1.0, "seed": 3, "n": 2},
    "logprobs": {"prompt": "and the block was", "temperature": 0, "logprobs": 2},
    "grammar": {
        "prompt": "Tell me in letters: ",
        "temperature": 0.8,
        "seed": 5,
        "structured_outputs": {"regex": "[a-f]{20,200}"},
        "ignore_eos": False,
    },
    ASIDE: {"prompt": "Nobody else asks for this one, " * 3, "temperature": 0},
}
COMMON: Json = {"model": "tiny", "ignore_eos": True, "stream": True}
PATIENCE_S = 150.0  # a client on a busy machine


@dataclass(slots=True)
class Answer:
    """One request as its client saw it."""

    question: str
    num_tokens: int
    label: str = "load"
    started_at_s: float = field(default_factory=time.monotonic)
    request_id: str = ""
    status: int = 0  # 0: no response
    texts: dict[int, str] = field(default_factory=dict)  # by choice
    ends: dict[int, str] = field(default_factory=dict)
    logprobs: list[float] = field(default_factory=list)
    usage: dict[str, int] = field(default_factory=dict)
    num_cached_tokens: int = 0  # tells of the cache, not of the answer
    arrivals_s: list[float] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)  # what breaks the protocol
    error: str = ""  # what the server said went wrong
    is_over: bool = False

    @property
    def is_refused(self) -> bool:
        """Refused before anything was done, as overload may."""
        return self.status in {429, 503}

    @property
    def is_complete(self) -> bool:
        return not self.faults and not self.error and bool(self.usage)

    @property
    def longest_stall_s(self) -> float:
        moments = [self.started_at_s, *self.arrivals_s]
        return max((later - earlier for earlier, later in itertools.pairwise(moments)), default=0.0)

    def stall_over_s(self, moment_s: float) -> float:
        """How long the stream stood still around this moment; 0 when it did not run then."""
        moments = [self.started_at_s, *self.arrivals_s]
        stalls = (
            later - earlier
            for earlier, later in itertools.pairwise(moments)
            if earlier <= moment_s < later
        )
        return next(stalls, 0.0)

    def tells(self) -> Json:
        """What an undisturbed run must tell, too."""
        return {
            "texts": self.texts,
            "ends": self.ends,
            "logprobs": [round(value, 6) for value in self.logprobs],
            "usage": self.usage,
        }

    def take(self, event: Json) -> None:
        """Take one event of the stream."""
        self.request_id = event.get("id", "").partition("-")[2] or self.request_id
        if "error" in event:
            self.error = event["error"]["message"]
        for choice in event.get("choices", ()):
            index = choice["index"]
            if index in self.ends:
                self.faults.append(f"choice {index} goes on after its end")
            self.texts[index] = self.texts.get(index, "") + choice["text"]
            self.logprobs += (choice["logprobs"] or {}).get("token_logprobs", ())
            if choice["finish_reason"] is not None:
                self.ends[index] = choice["finish_reason"]
        if usage := event.get("usage"):
            names = ("prompt_tokens", "completion_tokens", "total_tokens")
            self.usage = {name: usage[name] for name in names}
            self.num_cached_tokens = usage["prompt_tokens_details"]["cached_tokens"]


def body_of(question: str, num_tokens: int) -> Json:
    options = {"stream_options": {"include_usage": True}}
    return {**COMMON, **options, **QUESTIONS[question], "max_tokens": num_tokens}


async def ask(http: httpx.AsyncClient, answer: Answer) -> None:
    """Stream one answer to its end; whatever happens becomes part of it."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            opened = http.stream(
                "POST",
                "/v1/completions",
                json=body_of(answer.question, answer.num_tokens),
                headers={"x-request-id": answer.label},
            )
            async with opened as response:
                answer.status = response.status_code
                if response.status_code != httpx.codes.OK:
                    answer.error = (await response.aread()).decode()[:300]
                    return
                await _read(response, answer)
    except (httpx.HTTPError, TimeoutError) as error:
        answer.faults.append(f"the stream broke: {error!r}")
    finally:
        answer.is_over = True


async def _read(response: httpx.Response, answer: Answer) -> None:
    is_over = False
    async for data in _events(response):
        answer.arrivals_s.append(time.monotonic())
        if is_over:
            answer.faults.append("an event after the last one")
        if data == "[DONE]":
            is_over = True
        else:
            answer.take(json.loads(data))
            is_over = bool(answer.error)
    num_choices = QUESTIONS[answer.question].get("n", 1)
    if not is_over:
        answer.faults.append("it ended without a last event")
    elif not answer.error and len(answer.ends) != num_choices:
        answer.faults.append(f"only choices {sorted(answer.ends)} have an end")


async def _events(response: httpx.Response) -> AsyncIterator[str]:
    async for line in response.aiter_lines():
        if line.startswith("data: "):
            yield line.removeprefix("data: ")


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """So many clients, each asking one question after the other until it is told to end."""

    num_clients: int = 4
    num_requests: int | None = None  # of each client; None: until it is told to end
    num_tokens: int = 60
    questions: Sequence[str] = tuple(name for name in QUESTIONS if name != ASIDE)
    label: str = "load"  # the client's X-Request-Id, which faults may match

    async def run(self, url: str, is_over: asyncio.Event, answers: list[Answer]) -> None:
        """Ask until `is_over`, then let what runs come to its end."""
        async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as http:
            clients = range(self.num_clients)
            await asyncio.gather(*(self._client(http, n, is_over, answers) for n in clients))

    async def _client(
        self, http: httpx.AsyncClient, number: int, is_over: asyncio.Event, answers: list[Answer]
    ) -> None:
        # Clients start at different questions, so that every kind is always running.
        turns = itertools.islice(itertools.cycle(self.questions), number, None)
        for question in itertools.islice(turns, self.num_requests):
            if is_over.is_set():
                return
            answer = Answer(question, self.num_tokens, self.label)
            answers.append(answer)
            await ask(http, answer)
            if answer.is_refused:
                await asyncio.sleep(0.2)


CANARY = Load(num_clients=1, num_tokens=12, questions=("greedy",), label="canary")
