"""Where every request of an engine is.

waiting          in line for blocks and a place, owns nothing
waiting_for_kv   blocks reserved, KV on its way from a peer
activated        its KV is here, in line for a place
running          has a share in the next steps
held             handed over: its blocks stay until the peer has read them
"""

from bisect import insort
from collections.abc import Iterable, Sequence

from engine.request import Request, RequestStatus


def _rank(request: Request) -> tuple[int, int, int]:
    return request.rank


class RequestQueues:
    """Owns the queues. Invariant: a request is in one of them; the lists are in order of rank."""

    def __init__(self, *, max_num_seqs: int) -> None:
        self._max_num_seqs = max_num_seqs
        self._num_arrived = 0
        self.waiting: list[Request] = []
        self.activated: list[Request] = []
        self.running: list[Request] = []
        self.waiting_for_kv: dict[str, Request] = {}
        self.held: dict[str, Request] = {}

    @property
    def num_running_seqs(self) -> int:
        """Places taken among the running."""
        return sum(request.num_seqs for request in self.running)

    @property
    def num_places(self) -> int:
        """How many more may run."""
        return self._max_num_seqs - self.num_running_seqs

    def has_place_for(self, request: Request) -> bool:
        """Whether it may run, with all its choices."""
        return request.num_seqs <= self.num_places

    @property
    def num_growing(self) -> int:
        """Running requests that may soon want one more block each."""
        return sum(request.num_seqs for request in self.running if not request.hand_over)

    def arrive(self, request: Request) -> None:
        """Give a request its rank, unless it has one."""
        if not request.arrival:
            self._num_arrived += 1
            request.arrival = self._num_arrived

    def wait(self, request: Request, status: RequestStatus) -> None:
        """Put a request in line for blocks and a place."""
        request.status = status
        insort(self.waiting, request, key=_rank)

    def wait_for_kv(self, request: Request) -> None:
        """Put a request that has blocks where its KV is waited for."""
        request.status = RequestStatus.WAITING_FOR_KV
        self.waiting_for_kv[request.request_id] = request

    def activate(self, request: Request) -> None:
        """Move a request whose KV has come in line for a place."""
        del self.waiting_for_kv[request.request_id]
        request.status = RequestStatus.WAITING
        insort(self.activated, request, key=_rank)

    def run(self, request: Request) -> None:
        """Move a request that has blocks to the running set."""
        self.leave(request)
        request.status = RequestStatus.RUNNING
        insort(self.running, request, key=_rank)

    def fork(self, request: Request, branches: Sequence[Request]) -> None:
        """Put its choices in the place of a running or activated request."""
        queue = self.running if request.status is RequestStatus.RUNNING else self.activated
        queue.remove(request)
        for branch in branches:
            insort(queue, branch, key=_rank)
        request.status = RequestStatus.FINISHED

    def hold(self, request: Request) -> None:
        """Keep a running request for a peer."""
        self.running.remove(request)
        self.held[request.request_id] = request
        request.status = RequestStatus.FINISHED

    def leave(self, request: Request) -> None:
        """Take a request out of the queue it is in."""
        for kept in (self.waiting_for_kv, self.held):
            if kept.get(request.request_id) is request:
                del kept[request.request_id]
                return
        for queue in (self.running, self.waiting, self.activated):
            if request in queue:
                queue.remove(request)
                return

    def last_preemptable(self) -> Request | None:
        """The last in rank of those that have blocks and that no peer counts on."""
        return max(self._preemptable(), key=_rank, default=None)

    def preemptable_for(self, request: Request) -> list[Request]:
        """Those that make way for `request`, being of a worse priority; the last in rank first."""
        worse = [each for each in self._preemptable() if each.priority > request.priority]
        return sorted(worse, key=_rank, reverse=True)

    def check_integrity(self, requests: Iterable[Request]) -> None:
        """AssertionError when a request is not in exactly one queue, or a queue is out of order."""
        queues = (self.running, self.waiting, self.activated)
        queued = [request for queue in queues for request in queue]
        queued += [*self.waiting_for_kv.values(), *self.held.values()]
        assert sorted(map(id, queued)) == sorted(map(id, requests)), "a request is lost or doubled"
        for queue in queues:
            assert queue == sorted(queue, key=_rank), "a queue is out of order"
        assert self.num_places >= 0, "more run than may"
        assert not any(request.owned_block_ids for request in self.waiting)

    def _preemptable(self) -> list[Request]:
        return [each for each in (*self.running, *self.activated) if not each.hand_over]
