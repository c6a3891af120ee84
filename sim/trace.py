"""Recorded requests: when they came, how long they were, which blocks their prompts share.

Mooncake  JSON lines {timestamp (ms), input_length, output_length, hash_ids}, an id for each
          512 tokens; equal ids mean equal tokens from the prompt's start on
Azure     CSV TIMESTAMP, ContextTokens, GeneratedTokens; nothing is shared
"""

import csv
import itertools
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

import orjson

MOONCAKE_BLOCK_TOKENS = 512
MIN_REQUESTS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRequest:
    """One request of a trace."""

    arrived_s: float  # since the trace's start
    num_prompt_tokens: int
    num_output_tokens: int
    block_ids: tuple[int, ...]  # of the prompt's blocks; empty: it shares nothing

    @property
    def num_tokens(self) -> int:
        """Prompt and output."""
        return self.num_prompt_tokens + self.num_output_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Requests in order of arrival."""

    name: str
    requests: Sequence[TraceRequest]
    block_tokens: int = MOONCAKE_BLOCK_TOKENS  # what one of the block ids stands for

    def __post_init__(self) -> None:
        """Refuse what has no rate."""
        if len(self.requests) < MIN_REQUESTS:
            raise ValueError(
                f"{self.name} has {len(self.requests)} requests but at least {MIN_REQUESTS} are "
                "needed"
            )

    @property
    def rate(self) -> float:
        """Requests per second."""
        first, last = self.requests[0].arrived_s, self.requests[-1].arrived_s
        return (len(self.requests) - 1) / (last - first) if last > first else float("inf")

    def at_rate(self, rate: float) -> "Trace":
        """The same requests, closer together or further apart."""
        if not rate > 0.0:
            raise ValueError(f"Got {rate = } requests per second but expected more than 0")
        if self.rate == float("inf") != rate:
            raise ValueError(f"all requests of {self.name} come at one moment: it has no rate")
        factor = self.rate / rate if rate != float("inf") else 0.0
        first_s = self.requests[0].arrived_s
        requests = [
            replace(each, arrived_s=(each.arrived_s - first_s) * factor) for each in self.requests
        ]
        return replace(self, requests=requests)

    def first(self, num_requests: int) -> "Trace":
        """Its beginning."""
        return replace(self, requests=self.requests[:num_requests])

    def scaled(self, factor: float) -> "Trace":
        """The same requests with all lengths times `factor`; what was shared still is."""
        requests = [
            replace(
                each,
                num_prompt_tokens=max(round(each.num_prompt_tokens * factor), 1),
                num_output_tokens=max(round(each.num_output_tokens * factor), 1),
            )
            for each in self.requests
        ]
        # Rounded down, or the last block would not be filled.
        block_tokens = max(int(self.block_tokens * factor), 1)
        return replace(self, requests=requests, block_tokens=block_tokens)

    def within(self, max_tokens: int) -> "Trace":
        """The same requests, prompt and output together cut to `max_tokens`, the prompt first."""
        requests = []
        for each in self.requests:
            num_output_tokens = min(each.num_output_tokens, max_tokens - 1)
            num_prompt_tokens = min(each.num_prompt_tokens, max_tokens - num_output_tokens)
            requests.append(
                replace(
                    each, num_prompt_tokens=num_prompt_tokens, num_output_tokens=num_output_tokens
                )
            )
        return replace(self, requests=requests)


def read_trace(path: Path) -> Trace:
    """Read a file of either kind; ValueError says what is wrong with it, and where."""
    read = {".jsonl": _read_mooncake, ".csv": _read_azure}.get(path.suffix)
    if read is None:
        raise ValueError(f"Got a trace {path.name!r} but expected a .jsonl or .csv file")
    try:
        with path.open(encoding="utf-8") as lines:
            requests = sorted(read(lines), key=lambda each: each.arrived_s)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no text in UTF-8: {error.reason}") from error
    # An Azure trace says which day of the year it was.
    start_s = requests[0].arrived_s if requests else 0.0
    requests = [replace(each, arrived_s=each.arrived_s - start_s) for each in requests]
    return Trace(name=path.stem, requests=requests)


def _read_mooncake(lines: Iterable[str]) -> list[TraceRequest]:
    requests = []
    for number, line in enumerate(lines, start=1):
        try:
            fields = orjson.loads(line)
            requests.append(
                _make_request(
                    fields["timestamp"] / 1000.0,
                    int(fields["input_length"]),
                    int(fields["output_length"]),
                    tuple(map(operator.index, fields["hash_ids"])),
                )
            )
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"line {number}: expected timestamp, input_length, output_length and hash_ids, "
                f"got {error!r}"
            ) from error
    return requests


def _read_azure(lines: Iterable[str]) -> list[TraceRequest]:
    requests = []
    for number, fields in enumerate(csv.DictReader(lines), start=2):
        try:
            # Python's fromisoformat takes six digits of a second, the trace has seven.
            moment = datetime.fromisoformat(fields["TIMESTAMP"][:26])
            requests.append(
                _make_request(
                    (moment - datetime(moment.year, 1, 1)).total_seconds(),
                    int(fields["ContextTokens"]),
                    int(fields["GeneratedTokens"]),
                    (),
                )
            )
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"line {number}: expected TIMESTAMP, ContextTokens and GeneratedTokens, "
                f"got {error!r}"
            ) from error
    return requests


def _make_request(
    arrived_s: float, num_prompt_tokens: int, num_output_tokens: int, block_ids: tuple[int, ...]
) -> TraceRequest:
    if min(num_prompt_tokens, num_output_tokens, *block_ids) < 0:
        raise ValueError("a number below 0")
    # Recorded ones may be empty: somebody asked all the same.
    return TraceRequest(
        arrived_s=arrived_s,
        num_prompt_tokens=max(num_prompt_tokens, 1),
        num_output_tokens=max(num_output_tokens, 1),
        block_ids=block_ids,
    )


def ideal_hit_rate(trace: Trace) -> float:
    """Share of the prompt tokens that one endless cache for all would hold."""
    seen: set[int] = set()
    num_hit = 0
    for request in trace.requests:
        num_full = request.num_prompt_tokens // trace.block_tokens
        known = itertools.takewhile(seen.__contains__, request.block_ids[:num_full])
        num_hit += sum(1 for _ in known) * trace.block_tokens
        seen.update(request.block_ids)
    return num_hit / sum(each.num_prompt_tokens for each in trace.requests)
