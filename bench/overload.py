"""What is left of the goodput when three times more is asked for than can be served.

    .venv/bin/python -m bench.overload --url http://127.0.0.1:8000 [--seconds 20] [--key KEY]

Two phases against a running ingress, without streaming: as many clients as the decode workers take
requests at once, each with one request at a time (saturation); then requests that come by the
clock, more than three times as many a second as were served before, whoever is answered (storm).
Goodput counts the tokens of answers only. Prints one line of JSON: both goodputs and their ratio,
how much was offered, how fast and with what hint it was refused, what failed in any other way, and
how long after the storm a lone request took what it took before. Start the ingress with
`router.max_waiting_requests` of about the batch: a longer queue is a longer wait afterwards.
"""

import argparse
import asyncio
import json
import random
import statistics
import time
from dataclasses import dataclass, field
from urllib.parse import urlsplit

PROMPT_TOKENS = 24
STORM_FACTOR = 3.5
WARM_UP_S = 1.0  # before each phase counts
RECOVERED_WITHIN_S = 10.0


@dataclass(slots=True)
class Tally:
    """What became of the requests of one phase."""

    seconds: float = 0.0
    answer_s: list[float] = field(default_factory=list)
    refusal_s: list[float] = field(default_factory=list)
    num_tokens: int = 0  # of answers
    num_offered: int = 0
    start_s: float = 0.0  # of what counts
    end_s: float = 0.0
    failures: list[str] = field(default_factory=list)

    @classmethod
    def over(cls, seconds: float) -> "Tally":
        """A phase that begins to warm up now."""
        start_s = time.monotonic() + WARM_UP_S
        return cls(seconds=seconds, start_s=start_s, end_s=start_s + seconds)

    def is_on(self) -> bool:
        """Whether what happens now counts."""
        return self.start_s <= time.monotonic() < self.end_s

    @property
    def goodput(self) -> float:
        """Tokens a second that somebody got."""
        return self.num_tokens / self.seconds

    @property
    def offered(self) -> float:
        """Requests a second, whatever became of them."""
        return self.num_offered / self.seconds


class Load:
    """Clients of one ingress."""

    def __init__(self, url: str, *, key: str, num_tokens: int, seed: int = 1) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "127.0.0.1", parts.port or 80
        self._key = key
        self._num_tokens = num_tokens
        self._rng = random.Random(seed)
        self.model = ""

    async def post(self, path: str, body: object | None) -> tuple[int, dict[str, str], bytes]:
        """One request on a connection of its own: status, headers, body.

        By hand: the client must not take the cores that the server needs.
        """
        reader, writer = await asyncio.open_connection(self._host, self._port)
        data = b"" if body is None else json.dumps(body).encode()
        method = "GET" if body is None else "POST"
        head = f"{method} {path} HTTP/1.1\r\nhost: {self._host}\r\nconnection: close\r\n"
        head += f"authorization: Bearer {self._key}\r\n" if self._key else ""
        writer.write(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
        try:
            answer = await reader.read()
        finally:
            writer.close()
        first, _, rest = answer.partition(b"\r\n")
        head_bytes, _, content = rest.partition(b"\r\n\r\n")
        lines = head_bytes.decode("latin-1").split("\r\n")
        headers = {name.lower(): value for name, _, value in (x.partition(": ") for x in lines)}
        return int(first.split(b" ")[1]), headers, content

    async def ask(self, tally: Tally) -> None:
        """Ask for one completion."""
        prompt = [self._rng.randrange(3, 300) for _ in range(PROMPT_TOKENS)]
        body = {"model": self.model, "prompt": prompt, "max_tokens": self._num_tokens}
        started_s = time.perf_counter()
        try:
            status, headers, content = await self.post(
                "/v1/completions", body | {"ignore_eos": True, "temperature": 0}
            )
        except (OSError, IndexError, ValueError) as error:
            tally.failures.append(repr(error))
            return
        took_s = time.perf_counter() - started_s
        if status == 200:
            tally.answer_s.append(took_s)
            tally.num_tokens += json.loads(content)["usage"]["completion_tokens"]
        elif status == 429 and "retry-after" in headers:
            tally.refusal_s.append(took_s)
        else:
            tally.failures.append(f"{status}: {content[:200]!r}")

    async def saturate(self, num_clients: int, seconds: float) -> Tally:
        """Send from so many clients, each one request after the other."""
        tally = Tally.over(seconds)

        async def client() -> None:
            while time.monotonic() < tally.end_s:
                await self._ask_into(tally)

        await asyncio.gather(*(client() for _ in range(num_clients)))
        return tally

    async def storm(self, requests_per_s: float, seconds: float) -> Tally:
        """Requests by the clock, at random times."""
        tally = Tally.over(seconds)
        async with asyncio.TaskGroup() as group:
            due_s = time.monotonic()
            while due_s < tally.end_s:
                await asyncio.sleep(due_s - time.monotonic())
                group.create_task(self._ask_into(tally))
                due_s += self._rng.expovariate(requests_per_s)
        return tally

    async def _ask_into(self, tally: Tally) -> None:
        """Ask; only what is answered inside the phase is goodput, but whatever fails counts."""
        own = Tally()
        tally.num_offered += tally.is_on()
        await self.ask(own)
        tally.failures += own.failures
        tally.refusal_s += own.refusal_s
        if tally.is_on():
            tally.answer_s += own.answer_s
            tally.num_tokens += own.num_tokens

    async def recovery_s(self, normal_s: float, *, since_s: float) -> float:
        """How long until a lone request takes what it took in calm times, within a factor of 2."""
        while (asked_s := time.monotonic()) < since_s + RECOVERED_WITHIN_S:
            tally = Tally()
            await self.ask(tally)
            if tally.answer_s and tally.answer_s[0] < 2 * normal_s:
                break
        return asked_s - since_s


async def measure(
    url: str, *, seconds: float, key: str = "", num_tokens: int = 16, num_saturating: int = 0
) -> dict[str, object]:
    """Both phases and what follows."""
    load = Load(url, key=key, num_tokens=num_tokens)
    load.model = json.loads((await load.post("/v1/models", None))[2])["data"][0]["id"]
    loads = json.loads((await load.post("/v1/status", None))[2])["workers"]
    num_decode = sum(worker["pool"] == "decode" for worker in loads)
    num_saturating = num_saturating or 8 * num_decode
    calm = await load.saturate(1, min(2.0, seconds))
    normal_s = statistics.median(calm.answer_s)
    saturated = await load.saturate(num_saturating, seconds)
    served = len(saturated.answer_s) / seconds
    storm = await load.storm(STORM_FACTOR * served, seconds)
    recovered_s = await load.recovery_s(normal_s, since_s=storm.end_s)
    refusals = sorted(storm.refusal_s) or [0.0]
    return {
        "saturating_clients": num_saturating,
        "served_per_s": round(served, 1),
        "goodput_saturated": round(saturated.goodput, 1),
        "goodput_overloaded": round(storm.goodput, 1),
        "ratio": round(storm.goodput / saturated.goodput, 3),
        "offered_over_served": round(storm.offered / served, 2),
        "refused": len(storm.refusal_s),
        "refusal_p50_ms": round(1e3 * refusals[len(refusals) // 2], 1),
        "refusal_p99_ms": round(1e3 * refusals[int(len(refusals) * 0.99)], 1),
        "failed": len(saturated.failures) + len(storm.failures),
        "failures": (saturated.failures + storm.failures)[:3],
        "lone_request_s": round(normal_s, 3),
        "recovered_after_s": round(recovered_s, 2),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--saturating", type=int, default=0, help="0: 8 for each decode worker")
    parser.add_argument("--key", default="")
    options = parser.parse_args()
    result = measure(
        options.url,
        seconds=options.seconds,
        key=options.key,
        num_tokens=options.tokens,
        num_saturating=options.saturating,
    )
    print(json.dumps(asyncio.run(result)))


if __name__ == "__main__":
    main()
