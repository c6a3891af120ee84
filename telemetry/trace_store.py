"""The spans of the last requests of one ingress, its own and its workers', one request together.

request span begins -> its descendants are known by their parents
request span ends   -> worth exporting? sampled, failed or slow: what is there goes out, and
                       what its workers still send follows
too many have ended -> the oldest of them is forgotten
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanKind, format_trace_id

from telemetry import attributes

MAX_SPANS_PER_REQUEST: Final = 256
# However few are wanted: what workers send after a request's end must still find it.
MIN_REQUESTS: Final = 64

# What a person may know of a request.
_NAMES = (
    attributes.RELEVO_REQUEST_ID,
    attributes.GEN_AI_RESPONSE_ID,
    attributes.RELEVO_REQUEST_LABEL,
)


@dataclass(slots=True, kw_only=True)
class RequestTrace:
    """One request. Invariant: `spans` holds complete spans, each once."""

    root_id: int  # span id of the request itself
    spans: dict[int, ReadableSpan] = field(default_factory=dict)  # by span id
    span_ids: list[int] = field(default_factory=list)  # known to belong here, ended or not
    is_exported: bool = False
    num_dropped: int = 0
    # Once it has ended: whose it was, and how long it took.
    tenant: str = ""
    duration_ns: int = 0

    @property
    def root(self) -> ReadableSpan | None:
        """The request's own span, once it has ended."""
        return self.spans.get(self.root_id)

    @property
    def names(self) -> set[str]:
        """What somebody may call it, once it has ended."""
        root = self.root
        if root is None:
            return set()
        found = root.attributes or {}
        return {format_trace_id(root.context.trace_id)} | {
            str(found[key]) for key in _NAMES if key in found
        }


class TraceStore:
    """Owns the traces of running requests and of the last that ended. Use it on one event loop."""

    def __init__(
        self,
        *,
        max_requests: int,
        slow_first_token_s: float,
        export: Callable[[ReadableSpan], None],
    ) -> None:
        self._max_requests = max(max_requests, MIN_REQUESTS)
        self._slow_first_token_s = slow_first_token_s
        self._export = export
        self._ended: deque[RequestTrace] = deque()  # the oldest first
        self._owners: dict[int, RequestTrace] = {}  # by the id of any of its spans
        self._named: dict[str, deque[RequestTrace]] = {}  # those that ended, as in `_ended`

    def started(self, span: ReadableSpan) -> None:
        """Begin a request, or learn whose descendant this is."""
        parent = span.parent
        owner = self._owners.get(parent.span_id) if parent is not None else None
        if owner is None and span.kind is SpanKind.SERVER:
            owner = RequestTrace(root_id=span.context.span_id)
        if owner is not None:
            self._adopt(span.context.span_id, owner)

    def ended(self, span: ReadableSpan) -> None:
        """Keep a complete span with its request; a stranger's is ignored."""
        span_id, parent = span.context.span_id, span.parent
        if span_id not in self._owners and parent is not None and parent.span_id in self._owners:
            self._adopt(span_id, self._owners[parent.span_id])
        owner = self._owners.get(span_id)
        if owner is None or span_id in owner.spans:
            return
        owner.spans[span_id] = span
        if span_id == owner.root_id:
            self._end(owner, span)
        elif owner.is_exported:
            self._export(span)

    def received(self, span: ReadableSpan) -> None:
        """Keep a worker's span like one of ours."""
        self.ended(span)

    def find(self, name: str, *, tenant: str | None = None) -> RequestTrace | None:
        """Return the newest request of this id, label or trace id, of one tenant or of any."""
        found = reversed(self._named.get(name, ()))
        return next((each for each in found if tenant is None or each.tenant == tenant), None)

    def recent(self) -> Iterator[RequestTrace]:
        """Requests that have ended, the newest first."""
        return reversed(self._ended)

    def _end(self, owner: RequestTrace, root: ReadableSpan) -> None:
        if self._is_worth_exporting(root):
            owner.is_exported = True
            for each in owner.spans.values():
                self._export(each)
        owner.tenant = str((root.attributes or {}).get(attributes.RELEVO_TENANT, ""))
        owner.duration_ns = (root.end_time or 0) - (root.start_time or 0)
        self._ended.append(owner)
        for name in owner.names:
            self._named.setdefault(name, deque()).append(owner)
        if len(self._ended) > self._max_requests:
            self._forget(self._ended.popleft())

    def _forget(self, oldest: RequestTrace) -> None:
        for name in oldest.names:
            same = self._named[name]
            same.popleft()  # the oldest of this name, too
            if not same:
                del self._named[name]
        for span_id in oldest.span_ids:
            # Ids are random, not unique: a later request may have taken this one over.
            if self._owners.get(span_id) is oldest:
                del self._owners[span_id]

    def _is_worth_exporting(self, root: ReadableSpan) -> bool:
        found = root.attributes or {}
        first_token_s = found.get(attributes.GEN_AI_RESPONSE_TIME_TO_FIRST_CHUNK)
        is_slow = (
            self._slow_first_token_s > 0
            and isinstance(first_token_s, float)
            and first_token_s >= self._slow_first_token_s
        )
        return root.context.trace_flags.sampled or not root.status.is_ok or is_slow

    def _adopt(self, span_id: int, owner: RequestTrace) -> None:
        if len(owner.span_ids) < MAX_SPANS_PER_REQUEST:
            owner.span_ids.append(span_id)
            self._owners[span_id] = owner
        else:
            owner.num_dropped += 1
