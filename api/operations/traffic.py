"""The last minute in numbers: rates and quantiles out of counters that only grow."""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from telemetry import metrics
from telemetry.metrics import Sample

RATE_WINDOW_S: Final = 10.0
QUANTILE_WINDOW_S: Final = 60.0

_HISTOGRAMS = frozenset({metrics.TIME_TO_FIRST_TOKEN, metrics.INTER_TOKEN_LATENCY})
_EVENTS = frozenset({metrics.REQUESTS_FINISHED, metrics.PROMPT_TOKENS, metrics.ADMISSION_REJECTED})
METRICS: Final = _HISTOGRAMS | _EVENTS  # what is read of all metrics

_TTFT_COUNT = metrics.TIME_TO_FIRST_TOKEN + "_count"
_ITL_COUNT = metrics.INTER_TOKEN_LATENCY + "_count"
_BUCKETS = {name + "_bucket" for name in _HISTOGRAMS}
_COUNTERS = {_TTFT_COUNT, _ITL_COUNT, *_EVENTS}

Key = tuple[str, str]  # name and its one label's value, if it has one


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficSummary:
    """What an operator looks at first. None: nothing happened that could be measured."""

    requests_per_s: float
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    error_share: float | None  # of the requests that ended or were refused
    cache_hit_share: float | None  # of the prompt tokens
    first_token_p50_s: float | None
    first_token_p95_s: float | None
    inter_token_p50_s: float | None
    inter_token_p95_s: float | None

    @property
    def is_idle(self) -> bool:
        """Whether nothing moved."""
        return not (self.requests_per_s or self.prompt_tokens_per_s or self.output_tokens_per_s)


class Traffic:
    """Owns the totals of the last minute, one set a second."""

    def __init__(self) -> None:
        self._totals: deque[tuple[float, dict[Key, float]]] = deque()

    def take(self, samples: Iterable[Sample], *, now_s: float) -> None:
        """Note the totals as they stand now."""
        totals = {
            (each.name, next(iter(each.labels.values()), "")): each.value
            for each in samples
            if each.name in _COUNTERS or each.name in _BUCKETS
        }
        self._totals.append((now_s, totals))
        # One set older than the window stays: the window begins at it.
        while len(self._totals) > 2 and now_s - self._totals[1][0] >= QUANTILE_WINDOW_S:
            self._totals.popleft()

    def summary(self) -> TrafficSummary:
        """Return the rates of the last 10 seconds and the quantiles of the last 60."""
        window_s, recent = self._gains(RATE_WINDOW_S)
        _, minute = self._gains(QUANTILE_WINDOW_S)
        ended = _by_label(minute, metrics.REQUESTS_FINISHED)
        refused = sum(_by_label(minute, metrics.ADMISSION_REJECTED).values())
        prompts = _by_label(minute, metrics.PROMPT_TOKENS)
        cached = prompts.get("cached_prefill", 0.0) + prompts.get("cached_decode", 0.0)
        first_tokens, next_tokens = (
            recent.get((name, ""), 0.0) for name in (_TTFT_COUNT, _ITL_COUNT)
        )
        first = _buckets(minute, metrics.TIME_TO_FIRST_TOKEN)
        between = _buckets(minute, metrics.INTER_TOKEN_LATENCY)
        return TrafficSummary(
            requests_per_s=sum(_by_label(recent, metrics.REQUESTS_FINISHED).values()) / window_s,
            prompt_tokens_per_s=sum(_by_label(recent, metrics.PROMPT_TOKENS).values()) / window_s,
            output_tokens_per_s=(first_tokens + next_tokens) / window_s,
            error_share=_share(ended.get("error", 0.0) + refused, sum(ended.values()) + refused),
            cache_hit_share=_share(cached, sum(prompts.values())),
            first_token_p50_s=quantile(first, 0.5),
            first_token_p95_s=quantile(first, 0.95),
            inter_token_p50_s=quantile(between, 0.5),
            inter_token_p95_s=quantile(between, 0.95),
        )

    def _gains(self, window_s: float) -> tuple[float, dict[Key, float]]:
        """Seconds of the window there is, and what each total gained in it."""
        if len(self._totals) < 2:
            return 1.0, {}
        now_s, newest = self._totals[-1]
        started_s, oldest = next(
            (each for each in reversed(self._totals) if now_s - each[0] >= window_s),
            self._totals[0],
        )
        gains = {key: value - oldest.get(key, 0.0) for key, value in newest.items()}
        return max(now_s - started_s, 1e-9), gains


def quantile(buckets: Sequence[tuple[float, float]], share: float) -> float | None:
    """Return the value below which `share` of the observations lie, as Prometheus estimates it.

    `buckets` are upper bounds, the last infinite, with how many observations lie at or below each.
    """
    if not buckets or buckets[-1][1] <= 0:
        return None
    rank = share * buckets[-1][1]
    below, low = 0.0, 0.0
    for bound, count in buckets:
        if count >= rank:
            if bound == float("inf") or count == below:
                return low
            return low + (bound - low) * (rank - below) / (count - below)
        below, low = count, bound
    return low


def _buckets(gains: Mapping[Key, float], name: str) -> list[tuple[float, float]]:
    return sorted(
        (float(label), count) for (key, label), count in gains.items() if key == name + "_bucket"
    )


def _by_label(gains: Mapping[Key, float], name: str) -> dict[str, float]:
    return {label: gain for (key, label), gain in gains.items() if key == name}


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None
