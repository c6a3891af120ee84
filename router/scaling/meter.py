"""Measures the load of both pools from what the workers' state streams told the router."""

from collections import deque
from collections.abc import Iterable, Sequence

from router.fleet import Fleet
from router.scaling.load import ClusterLoad, DecodeLoad, PrefillLoad
from router.worker_state import WorkerState
from router.worker_view import DECODE, PREFILL, WorkerKey, WorkerView

RATE_WINDOW_S = 10.0


class LoadMeter:
    """Owns the workers' counters of the last seconds: a rate needs two looks at them."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._counted: dict[WorkerKey, int] = {}
        self._total = 0  # tokens computed by anybody since the first look
        self._looks: deque[tuple[float, int]] = deque()

    def look(self, now_s: float, *, queued_requests: int, queued_tokens: int) -> ClusterLoad:
        """The load of this moment; called about once a second."""
        states = list(self._fleet.states.values())
        self._count(states)
        self._looks.append((now_s, self._total))
        while self._looks[0][0] < now_s - RATE_WINDOW_S:
            self._looks.popleft()
        return ClusterLoad(
            now_s=now_s,
            prefill=self._prefill(_serving(states, PREFILL)),
            decode=_decode(_serving(states, DECODE)),
            queued_requests=queued_requests,
            queued_tokens=queued_tokens,
        )

    def num_serving(self, pool: str) -> int:
        """Workers that take requests now."""
        return len(_serving(self._fleet.states.values(), pool))

    def _count(self, states: Iterable[WorkerState]) -> None:
        counted: dict[WorkerKey, int] = {}
        for state in states:
            if state.description.pool == PREFILL and state.load is not None:
                number = counted[state.key] = state.load.num_computed_tokens
                self._total += max(number - self._counted.get(state.key, number), 0)
        self._counted = counted

    def _prefill(self, views: Sequence[WorkerView]) -> PrefillLoad:
        if not views:
            return PrefillLoad()
        (first_s, first), (last_s, last) = self._looks[0], self._looks[-1]
        return PrefillLoad(
            num_workers=len(views),
            waiting_tokens=sum(view.num_tokens_ahead for view in views),
            computed_tokens_per_s=(last - first) / (last_s - first_s) if last_s > first_s else 0.0,
            token_s=sum(view.token_s for view in views) / len(views),
        )


def _serving(states: Iterable[WorkerState], pool: str) -> list[WorkerView]:
    return [
        view
        for state in states
        if state.description.pool == pool
        and state.is_routable
        and (view := state.view()) is not None
    ]


def _decode(views: Sequence[WorkerView]) -> DecodeLoad:
    if not views:
        return DecodeLoad()
    return DecodeLoad(
        num_workers=len(views),
        num_streams=sum(view.num_requests for view in views),
        max_streams=sum(view.max_num_seqs for view in views) / len(views),
        kv_tokens=sum(view.kv_tokens for view in views),
        max_kv_tokens=sum(view.num_kv_blocks * view.block_size for view in views) / len(views),
        step_s=sum(max(view.step_s - _streams_s(view), 0.0) for view in views) / len(views),
        streams_s=sum(map(_streams_s, views)),
    )


def _streams_s(view: WorkerView) -> float:
    """What its streams add to each of its steps, as far as it is known."""
    kv_tokens = view.num_used_blocks * view.block_size
    return view.num_running * view.request_s + kv_tokens * view.kv_token_s
