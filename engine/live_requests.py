"""The live requests of an engine, each as itself or, once it has forked, as its choices.

What a token or a word from outside makes of them: go on, be held for a peer, fork, or end.
"""

from collections.abc import Iterator, Mapping

from engine.kv_cache import KVCache
from engine.output import last_output, last_outputs, make_output
from engine.request import FinishReason, Request, RequestOutput, RequestStatus, take_tokens
from engine.scheduler import Scheduler
from engine.stopping import finish_reason


class LiveRequests:
    """Knows every request that has not ended, by id.

    Invariants: an id is in use while one of its choices lives; each choice ends in one output with
    a finish reason.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        kv_cache: KVCache,
        *,
        eos_token_ids: tuple[int, ...],
        max_model_len: int,
    ) -> None:
        self._scheduler = scheduler
        self._kv_cache = kv_cache
        self.eos_token_ids = eos_token_ids
        self.max_model_len = max_model_len
        self._by_id: dict[str, list[Request]] = {}

    def __iter__(self) -> Iterator[Request]:
        return (request for requests in self._by_id.values() for request in requests)

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._by_id

    def get(self, request_id: str) -> list[Request]:
        """What lives under an id."""
        return list(self._by_id.get(request_id, ()))

    def add(self, request: Request) -> None:
        """Take a new request; its id must not be in use."""
        assert request.request_id not in self._by_id
        self._by_id[request.request_id] = [request]

    def go_on(
        self, request: Request, tokens: Mapping[int, int], *, with_timings: bool
    ) -> list[RequestOutput]:
        """Give each choice its token; those it does not end go on, held for a peer or here."""
        branches = take_tokens(request, tokens)
        reasons = [self._finish_reason(branch) for branch in branches]
        if request.hand_over:
            # Also when all end here: a peer may be reading the blocks until it is told.
            self._scheduler.hold(request)
        else:
            going_on = [b for b, reason in zip(branches, reasons, strict=True) if reason is None]
            self._replace(request, going_on)
        return [
            make_output(
                branch,
                token_ids=(branch.token_ids[-1],),
                finish_reason=reason,
                with_timings=with_timings or reason is not None,
            )
            for branch, reason in zip(branches, reasons, strict=True)
        ]

    def abort(self, request_id: str) -> list[RequestOutput]:
        """End a request in any state; the last output of each choice that had not ended."""
        outputs: list[RequestOutput] = []
        for request in self.get(request_id):
            if request.status is not RequestStatus.FINISHED:
                outputs += last_outputs(request, FinishReason.ABORT)
            self._end(request)
        return outputs

    def abort_choice(self, request_id: str, choice_index: int) -> list[RequestOutput]:
        """End one choice, also one whose prompt is still being computed; the others go on."""
        for request in self.get(request_id):
            is_held = request.status is RequestStatus.FINISHED
            if is_held or choice_index not in request.open_choices:
                continue
            request.ended_choices.add(choice_index)
            if not request.open_choices:
                self._end(request)
            return [last_output(request, choice_index, FinishReason.ABORT)]
        return []

    def fail(self, request: Request, error: str) -> list[RequestOutput]:
        """End a request whose KV may be spoilt, or the choices it has become a moment ago."""
        live = self.get(request.request_id)
        if request in live or request.num_choices == 1:
            live = [each for each in live if each is request]
        for each in live:
            self._end(each, is_poisoned=True)
        return last_outputs(request, FinishReason.ERROR, error=error)

    def _finish_reason(self, request: Request) -> FinishReason | None:
        return finish_reason(
            request, eos_token_ids=self.eos_token_ids, max_model_len=self.max_model_len
        )

    def _replace(self, request: Request, going_on: list[Request]) -> None:
        """Put the choices that go on in the place of a computed request."""
        if going_on == [request]:
            return
        if not going_on:
            self._end(request)
            return
        copies = self._scheduler.fork(request, going_on)
        self._by_id[request.request_id] = going_on
        self._kv_cache.copy(copies)

    def _end(self, request: Request, *, is_poisoned: bool = False) -> None:
        left = [other for other in self._by_id.pop(request.request_id) if other is not request]
        if left:
            self._by_id[request.request_id] = left
        self._scheduler.remove(request, is_poisoned=is_poisoned)
