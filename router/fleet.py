"""All workers as routing sees them: their states, what they cache, one view of the moment.

No event loop and no connection: `WorkerState.apply` takes the messages of a worker's state stream,
whoever carries them.
"""

from collections.abc import Callable

from router.pools import Pools
from router.prefix_index import PrefixIndex
from router.typical_rates import TypicalRates
from router.worker_state import WorkerState
from router.worker_view import DECODE, PREFILL, Pending, WorkerKey
from rpc.description import WorkerDescription


class Fleet:
    """Owns one WorkerState per (worker_id, incarnation) and both pools' indexes."""

    def __init__(self) -> None:
        self.indexes = {PREFILL: PrefixIndex(), DECODE: PrefixIndex()}
        self.states: dict[WorkerKey, WorkerState] = {}
        self._rates = TypicalRates()
        self._changed: dict[WorkerKey, None] = {}
        self._pools = Pools()

    def add(self, description: WorkerDescription, *, now_s: float) -> WorkerState:
        """Begin to know a worker; its pool must be one of ours."""
        key = WorkerKey(description.worker_id, description.incarnation)
        state = WorkerState(
            description,
            self.indexes[description.pool],
            now_s=now_s,
            rates=self._rates,
            on_view_change=self._note_change(key),
        )
        self.states[key] = state
        return state

    def remove(self, key: WorkerKey) -> WorkerState:
        """Forget a worker and all it held."""
        state = self.states.pop(key)
        state.forget()
        self._changed[key] = None
        return state

    def add_pick(self, key: WorkerKey, pick_id: int, pending: Pending, *, now_s: float) -> None:
        """Count a request that is on its way."""
        self.states[key].add_pick(pick_id, pending, now_s=now_s)

    def pools(self) -> Pools:
        """All connected workers of this moment, until the next call."""
        if self._changed:
            for key in self._changed:
                self._refresh(key)
            self._changed.clear()
            self._pools.settle()
        return self._pools

    def _refresh(self, key: WorkerKey) -> None:
        state = self.states.get(key)
        view = state.view() if state is not None and state.is_connected else None
        if view is not None:
            self._pools.set(view)
        else:
            self._pools.remove(key)

    def _note_change(self, key: WorkerKey) -> Callable[[], None]:
        def note() -> None:
            self._changed[key] = None

        return note
