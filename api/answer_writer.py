"""What each HTTP API does with an answer: the one part in which they differ."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from api.call import Call
from api.choice_text import TextDelta
from api.errors import ApiError
from api.logprobs_formats import Json
from api.text_stream import TextStream
from api.token_text import TokenBytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Answering:
    """What there is to write about."""

    call: Call
    streams: Sequence[TextStream]  # one for each of the call's requests
    model: str
    created: int  # seconds since the epoch
    token_bytes: TokenBytes


class AnswerWriter(Protocol):
    """Writes one request's answer, either whole or as events, in the words of one API."""

    id: str

    def events(self, index: int, delta: TextDelta) -> Iterable[bytes]:
        """Return the events for what a step added to a choice."""
        ...

    def last_events(self) -> Iterable[bytes]:
        """Return the events behind the end of the last choice."""
        ...

    def failure(self, error: ApiError) -> bytes:
        """Return the event that ends a stream early."""
        ...

    def body(self, choices: Sequence[TextDelta]) -> Json:
        """Return the whole answer at once."""
        ...


class NewWriter(Protocol):
    """Makes the writer of one answer."""

    def __call__(self, answering: Answering) -> AnswerWriter:
        """Return a writer that has written nothing yet."""
        ...
