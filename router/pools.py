"""All connected workers of this moment: their views, and the same numbers as columns.

    row ◄──► worker     a worker that leaves gives its row to the last one
    column ──► a number of every worker, by the name it has in WorkerView

One formula then costs a thousand workers in as many steps as one (`router/cost.py`).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from router.worker_view import DECODE, PREFILL, LinkView, WorkerKey, WorkerView

COLUMNS = (
    "is_open",
    "max_tokens",
    "max_num_seqs",
    "num_kv_blocks",
    "block_size",
    "num_requests",
    "num_running",
    "num_streams",
    "num_free_blocks",
    "num_used_blocks",
    "chunk_tokens",
    "kv_bytes_per_token",
    "pending_bytes",
    "promised_tokens",
    "kv_tokens",
    "request_s",
    "num_prompts_ahead",
    "queue_s",
    "fixed_s",
    "added_s",
    "token_s",
    "streams_s",
    "kv_token_s",
)
LINK_COLUMNS = ("byte_s", "latency_s", "queued_bytes")
FIRST_ROWS = 16
FIRST_LINKS = 4
NOBODY = -1

Floats = npt.NDArray[np.float64]
Rows = npt.NDArray[np.intp]
_numbers_of = attrgetter(*COLUMNS)
_link_numbers_of = attrgetter(*LINK_COLUMNS)


class Columns:
    """The numbers of many workers: an array by each name."""

    def __init__(self, columns: Mapping[str, Floats]) -> None:
        self.__dict__.update(columns)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"no column {name}")

    def take(self, names: Iterable[str], key: Any) -> "Columns":
        """Some columns, indexed alike."""
        return Columns({name: self.__dict__[name][key] for name in names})


@dataclass(frozen=True, slots=True)
class LinkColumns:
    """The numbers of links, arrays of one shape."""

    byte_s: Floats
    latency_s: Floats
    queued_bytes: Floats


class WorkerTable:
    """Owns the rows of one pool. Invariant: row n has the numbers of view n."""

    def __init__(self) -> None:
        self.views: list[WorkerView] = []
        self.row_of: dict[WorkerKey, int] = {}
        self._matrix = np.zeros((FIRST_ROWS, len(COLUMNS)))
        self._columns: Columns | None = None

    def set(self, view: WorkerView) -> int:
        """Take a worker in, or its newer view; returns its row."""
        row = self.row_of.get(view.key)
        if row is None:
            row = self.row_of[view.key] = len(self.views)
            self.views.append(view)
            self._columns = None
            if row == len(self._matrix):
                self._matrix = np.concatenate([self._matrix, np.zeros_like(self._matrix)])
        self.views[row] = view
        self._matrix[row] = _numbers_of(view)
        return row

    def remove(self, key: WorkerKey) -> None:
        """Let a worker go."""
        row = self.row_of.pop(key)
        last = self.views.pop()
        if last.key != key:
            self.views[row] = last
            self.row_of[last.key] = row
            self._matrix[row] = self._matrix[len(self.views)]
        self._columns = None

    @property
    def columns(self) -> Columns:
        """Of all its workers; they change with the rows."""
        if self._columns is None:
            columns = self._matrix[: len(self.views)].T
            self._columns = Columns(dict(zip(COLUMNS, columns, strict=True)))
        return self._columns

    def spread(self, values: Mapping[WorkerKey, int]) -> Floats:
        """A number for each worker; 0 for those left out."""
        column = np.zeros(len(self.views))
        row_of = self.row_of
        for key, value in values.items():
            if (row := row_of.get(key)) is not None:
                column[row] = value
        return column

    def mask(self, keys: Iterable[WorkerKey]) -> npt.NDArray[np.bool_]:
        """True for these workers."""
        mask = np.zeros(len(self.views), dtype=bool)
        mask[[self.row_of[key] for key in keys if key in self.row_of]] = True
        return mask


class LinkTable:
    """Owns the links, each at a place of its decode worker's row.

    Invariant: places 0 to n - 1 of a row are its n links, NOBODY stands behind them. A link's
    number is that of its place with all rows in one.
    """

    def __init__(self) -> None:
        self._peers = np.full((FIRST_ROWS, FIRST_LINKS), NOBODY, dtype=np.intp)
        self._numbers = np.zeros((len(LINK_COLUMNS), FIRST_ROWS, FIRST_LINKS))
        self._links_of: Rows | None = None

    def set(
        self, row: int, links: Mapping[WorkerKey, LinkView], row_of: Mapping[WorkerKey, int]
    ) -> None:
        """These are the row's links now; to a peer nobody knows there is none."""
        known = [(row_of[key], link) for key, link in links.items() if key in row_of]
        self._make_room(row, len(known))
        peers = [peer for peer, _ in known]
        peers += [NOBODY] * (self._peers.shape[1] - len(peers))
        if self._peers[row].tolist() != peers:
            self._peers[row] = peers
            self._links_of = None
        if known:
            numbers = zip(*(_link_numbers_of(link) for _, link in known), strict=True)
            self._numbers[:, row, : len(known)] = list(numbers)

    def clear(self, first_row: int) -> None:
        """No links from this row on."""
        self._peers[first_row:] = NOBODY
        self._links_of = None

    def links_of(self, num_feeders: int) -> Rows:
        """Numbers of each prefill worker's links, NOBODY behind them: [prefill workers, links]."""
        if self._links_of is None or len(self._links_of) != num_feeders:
            peers = self._peers.ravel()
            numbers = np.argsort(peers, kind="stable")[np.count_nonzero(peers == NOBODY) :]
            counts = np.bincount(peers[numbers], minlength=num_feeders)
            starts = np.cumsum(counts) - counts
            places = np.arange(len(numbers)) - np.repeat(starts, counts)
            self._links_of = np.full((num_feeders, max(counts.max(initial=0), 1)), NOBODY)
            self._links_of[peers[numbers], places] = numbers
        return self._links_of

    def takers(self, numbers: Rows) -> Rows:
        """Rows of the decode workers at the end of these links."""
        rows: Rows = numbers // self._peers.shape[1]
        return rows

    def columns(self, numbers: Rows) -> LinkColumns:
        """Of these links."""
        flat = self._numbers.reshape(len(LINK_COLUMNS), -1)
        return LinkColumns(*flat.take(numbers, axis=1))  # an index would take five times as long

    def _make_room(self, row: int, num_links: int) -> None:
        num_rows, num_places = self._peers.shape
        grown = (num_rows * (2 if row >= num_rows else 1), max(num_places, num_links))
        if grown == self._peers.shape:
            return
        peers, numbers = self._peers, self._numbers
        self._peers = np.full(grown, NOBODY, dtype=np.intp)
        self._peers[:num_rows, :num_places] = peers
        self._numbers = np.zeros((len(LINK_COLUMNS), *grown))
        self._numbers[:, :num_rows, :num_places] = numbers
        self._links_of = None

    def peers(self, row: int) -> list[int]:
        """Rows of the prefill workers that a decode worker is linked to."""
        return [peer for peer in self._peers[row].tolist() if peer != NOBODY]


class Pools:
    """Owns both tables and the links between them.

    Invariant: `num_memberships` grows whenever a worker comes or goes, and with nothing else.
    """

    def __init__(self, views: Iterable[WorkerView] = ()) -> None:
        self.tables = {PREFILL: WorkerTable(), DECODE: WorkerTable()}
        self.links = LinkTable()
        self.num_memberships = 0
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
        if view.key not in table.row_of:
            self._note_membership()
        before = table.views[table.row_of[view.key]] if view.key in table.row_of else None
        row = table.set(view)
        if view.pool == DECODE and (before is None or before.links is not view.links):
            self._set_links(row, view)

    def remove(self, key: WorkerKey) -> None:
        """Let a worker go, if it is here."""
        for table in self.tables.values():
            if key in table.row_of:
                table.remove(key)
                self._note_membership()

    def settle(self) -> None:
        """Bring the links in line after workers came or went; before every decision."""
        if self._has_new_rows:
            self._has_new_rows = False
            self.links.clear(len(self.decode))
            for row, view in enumerate(self.decode):
                self._set_links(row, view)

    def _note_membership(self) -> None:
        self.num_memberships += 1
        self._has_new_rows = True

    def _set_links(self, row: int, view: WorkerView) -> None:
        self.links.set(row, view.links, self.tables[PREFILL].row_of)

    def check_integrity(self) -> None:
        """Assert that views, rows and links say the same; after `settle`."""
        for table in self.tables.values():
            assert len(table.views) == len(table.row_of) == len(table.columns.is_open)
            for key, row in table.row_of.items():
                view = table.views[row]
                assert view.key == key
                for name in COLUMNS:
                    assert getattr(table.columns, name)[row] == getattr(view, name), (key, name)
        feeders = self.prefill
        pairs = {
            (feeder, int(self.links.takers(number)))
            for feeder, numbers in enumerate(self.links.links_of(len(feeders)))
            for number in numbers
            if number != NOBODY
        }
        for row, view in enumerate(self.decode):
            assert {(peer, row) for peer in self.links.peers(row)} == {
                pair for pair in pairs if pair[1] == row
            }
            peers = {feeders[peer].key for peer in self.links.peers(row)}
            assert peers == view.links.keys() & self.tables[PREFILL].row_of.keys(), view.key
