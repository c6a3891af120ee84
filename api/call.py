"""One HTTP request for text, judged and tokenised, whichever API it came by."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from api.generation_request import GenerationRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Streaming:
    """How an answer is sent."""

    is_stream: bool = False
    has_usage_chunk: bool = False  # one more chunk, at the end, with usage and no choice
    has_running_usage: bool = False  # usage so far in every other chunk too


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """What is to be done: a generation for each prompt."""

    operation: str
    requests: Sequence[GenerationRequest]
    streaming: Streaming
    unknown_fields: Sequence[str] = ()
    echoed: Mapping[str, object] = field(default_factory=dict)  # what the answer repeats of it

    @property
    def is_stream(self) -> bool:
        """Whether the answer is a stream of events."""
        return self.streaming.is_stream
