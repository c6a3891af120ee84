"""All connected workers of this moment: their views, and the same numbers as columns.

    row ◄──► worker     a worker that leaves gives its row to the last one
    column ──► a number of every worker, by the name it has in WorkerView

One formula then costs a thousand workers in as many steps as one (`router/totals.py`).
"""

from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from router.worker_view import DECODE, NO_SLOT, PREFILL, LinkView, WorkerKey, WorkerView

COLUMNS = (
    "open_tokens",
    "max_num_seqs",
    "num_kv_blocks",
    "block_size",
    "num_requests",
    "num_free_blocks",
    "chunk_tokens",
    "kv_bytes_per_token",
    "pending_bytes",
    "promised_tokens",
    "queue_s",
    "fixed_s",
    "token_s",
    "streams_s",
    "kv_harm_s",
    "prompt_harm_s",
    "company_s",
    "seq_step_s",
    "seq_wait_s",
    "block_step_s",
)
FIRST_ROWS = 16
NOBODY = -1

Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]
Rows = npt.NDArray[np.intp]
_numbers_of = attrgetter(*COLUMNS)


class Columns:
    """The numbers of many workers: an array by each name."""

    def __init__(self, columns: Mapping[str, Floats]) -> None:
        self.__dict__.update(columns)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"no column {name}")


class WorkerTable:
    """Owns the rows of one pool.

    Invariant: row n has the numbers and the slot of view n; behind the last one stands a row of
    zeros, nobody's.
    """

    def __init__(self) -> None:
        self.views: list[WorkerView] = []
        self.row_of: dict[WorkerKey, int] = {}
        self._matrix = np.zeros((len(COLUMNS), FIRST_ROWS))
        self._slots = np.full(FIRST_ROWS, NO_SLOT, dtype=np.intp)
        self._num_prompts_ahead = 0  # of all rows
        self._columns: Columns | None = None

    def set(self, view: WorkerView) -> int:
        """Take a worker in, or its newer view; returns its row."""
        row = self.row_of.get(view.key)
        if row is None:
            row = self.row_of[view.key] = len(self.views)
            self.views.append(view)
            self._columns = None
            if row + 1 == len(self._slots):
                self._matrix = np.concatenate((self._matrix, 0.0 * self._matrix), axis=1)
                self._slots = np.concatenate((self._slots, self._slots))
        else:
            self._num_prompts_ahead -= self.views[row].num_prompts_ahead
        self._num_prompts_ahead += view.num_prompts_ahead
        self.views[row] = view
        self._matrix[:, row] = _numbers_of(view)
        self._slots[row] = view.slot
        return row

    def remove(self, key: WorkerKey) -> None:
        """Let a worker go."""
        row = self.row_of.pop(key)
        self._num_prompts_ahead -= self.views[row].num_prompts_ahead
        last = self.views.pop()
        if last.key != key:
            self.views[row] = last
            self.row_of[last.key] = row
            self._matrix[:, row] = self._matrix[:, len(self.views)]
            self._slots[row] = last.slot
        self._matrix[:, len(self.views)] = 0.0
        self._columns = None

    @property
    def columns(self) -> Columns:
        """Of all its workers; they change with the rows."""
        if self._columns is None:
            columns = self._matrix[:, : len(self.views)]
            self._columns = Columns(dict(zip(COLUMNS, columns, strict=True)))
        return self._columns

    @property
    def mean_prompts_ahead(self) -> float:
        """Prompts that wait on each of them, on average."""
        return self._num_prompts_ahead / max(len(self.views), 1)

    def with_nobody(self, name: str) -> Floats:
        """One column with nobody's 0 at its end, where NOBODY finds it."""
        column: Floats = self._matrix[COLUMNS.index(name), : len(self.views) + 1]
        return column

    @property
    def slots(self) -> Rows:
        """Of each worker in its pool's index."""
        return self._slots[: len(self.views)]

    def mask(self, keys: Iterable[WorkerKey]) -> Mask:
        """True for these workers."""
        mask = np.zeros(len(self.views), dtype=bool)
        mask[[self.row_of[key] for key in keys if key in self.row_of]] = True
        return mask


class LinkTable:
    """Owns the links: a column for each decode worker, its links one below the other.

    Place 0 of each column is the worker alone, its links stand at places 1 to n. A choice's number
    is that of its place, row by row.

    Invariant: a link to somebody unknown, and what stands behind the links, has NOBODY at its other
    end, as place 0 has.
    """

    def __init__(self, num_links: int = 0, num_takers: int = 0) -> None:
        self._feeders: Rows = np.full((1 + num_links, num_takers), NOBODY, dtype=np.intp)
        self.feeders = self._feeders[1:]  # of the links alone, as all below
        self._numbers = np.zeros((3, num_links, num_takers))
        self.byte_s, self.latency_s, self.queued_bytes = self._numbers

    @property
    def shape(self) -> tuple[int, int]:
        """Of an array with all choices: places, decode workers."""
        num_places, num_takers = self._feeders.shape
        return num_places, num_takers

    def has_room(self, links: Mapping[WorkerKey, LinkView]) -> bool:
        """Whether one worker can have so many."""
        return len(links) <= len(self.feeders)

    def set(
        self, taker: int, links: Mapping[WorkerKey, LinkView], row_of: Mapping[WorkerKey, int]
    ) -> None:
        """These are a decode worker's links now; `row_of` has the rows of prefill workers."""
        feeders = [row_of.get(key, NOBODY) for key in links]
        num_free = len(self.feeders) - len(feeders)
        self.feeders[:, taker] = feeders + [NOBODY] * num_free
        if feeders:
            numbers = [(link.byte_s, link.latency_s, link.queued_bytes) for link in links.values()]
            self._numbers[:, : len(feeders), taker] = np.array(numbers).T

    def feeder_of(self, number: Any) -> Any:
        """Row of the prefill worker of a choice, or of several; NOBODY: the other one alone."""
        return self._feeders.ravel()[number]

    def taker_of(self, number: Any) -> Any:
        """Row of the decode worker of a choice, or of several."""
        return number % self._feeders.shape[1]

    def feeders_of(self, taker: int) -> list[int]:
        """Rows of the prefill workers that a decode worker is linked to."""
        return [feeder for feeder in self.feeders[:, taker].tolist() if feeder != NOBODY]


class Pools:
    """Owns both tables and the links between them.

    Invariants: `num_memberships` grows whenever a worker comes or goes, and with nothing else;
    `num_openings` whenever a prompt that had no choice may have one.
    """

    def __init__(self, views: Iterable[WorkerView] = ()) -> None:
        self.tables = {PREFILL: WorkerTable(), DECODE: WorkerTable()}
        self.links = LinkTable()
        self.num_memberships = 0
        self.num_openings = 0
        self._has_new_rows = False
        for view in views:
            self.set(view)
        self.settle()

    @property
    def prefill(self) -> Sequence[WorkerView]:
        """All prefill workers."""
        return self.tables[PREFILL].views

    @property
    def decode(self) -> Sequence[WorkerView]:
        """All decode workers."""
        return self.tables[DECODE].views

    def set(self, view: WorkerView) -> None:
        """Take a worker in, or its newer view."""
        table = self.tables[view.pool]
        row = table.row_of.get(view.key)
        before = table.views[row] if row is not None else None
        row = table.set(view)
        if before is None:
            self._note_membership()
            return
        self.num_openings += _opens(before, view)
        if view.pool == DECODE and before.links is not view.links and not self._has_new_rows:
            self._has_new_rows = not self.links.has_room(view.links)
            if not self._has_new_rows:
                self.links.set(row, view.links, self.tables[PREFILL].row_of)

    def remove(self, key: WorkerKey) -> None:
        """Let a worker go, if it is here."""
        for table in self.tables.values():
            if key in table.row_of:
                table.remove(key)
                self._note_membership()

    def settle(self) -> None:
        """Bring the links in line after workers came or went; before every decision."""
        if not self._has_new_rows:
            return
        self._has_new_rows = False
        most = max((len(view.links) for view in self.decode), default=0)
        self.links = LinkTable(most, len(self.decode))
        for row, view in enumerate(self.decode):
            self.links.set(row, view.links, self.tables[PREFILL].row_of)

    def _note_membership(self) -> None:
        self.num_memberships += 1
        self.num_openings += 1
        self._has_new_rows = True

    def check_integrity(self) -> None:
        """Assert that views, rows and links say the same; after `settle`."""
        for table in self.tables.values():
            assert len(table.views) == len(table.row_of) == len(table.slots)
            counts = [view.num_prompts_ahead for view in table.views]
            assert table.mean_prompts_ahead == sum(counts) / max(len(counts), 1)
            for key, row in table.row_of.items():
                view = table.views[row]
                assert view.key == key
                assert table.slots[row] == view.slot
                assert table.with_nobody("num_requests")[NOBODY] == 0.0
                for name in COLUMNS:
                    assert getattr(table.columns, name)[row] == getattr(view, name), (key, name)
        assert self.links.feeders.shape[1] == len(self.decode)
        for row, view in enumerate(self.decode):
            peers = {self.prefill[feeder].key for feeder in self.links.feeders_of(row)}
            assert peers == view.links.keys() & self.tables[PREFILL].row_of.keys(), view.key
            for place, (peer, link) in enumerate(view.links.items()):
                numbers = (self.links.byte_s, self.links.latency_s, self.links.queued_bytes)
                known = tuple(float(column[place, row]) for column in numbers)
                assert known == (link.byte_s, link.latency_s, link.queued_bytes), (peer, view.key)


def _opens(before: WorkerView, view: WorkerView) -> bool:
    """Whether a worker takes what it did not: longer prompts, or some over another link."""
    if view.open_tokens > before.open_tokens:
        return True
    return view.links is not before.links and not view.links.keys() <= before.links.keys()
