"""What became of one request, as its client saw it."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from load_generator.planned_request import PlannedRequest


class Ending(Enum):
    """How it ended."""

    COMPLETED = "completed"
    CANCELLED = "cancelled"  # by its own client, as planned
    FAILED = "failed"


@dataclass(slots=True, kw_only=True)
class Outcome:
    """Times are those of one monotonic clock."""

    request: PlannedRequest
    due_s: float  # when it should have been sent; latencies count from here
    sent_s: float = 0.0  # when its first attempt was
    ended_s: float = 0.0
    ending: Ending = Ending.FAILED
    error: str = ""  # why it failed
    num_attempts: int = 0
    status: int = 0  # of the last attempt; 0 = no answer
    token_times_s: list[float] = field(default_factory=list)  # one for each event with tokens
    finish_reason: str = ""
    usage: dict[str, Any] = field(default_factory=dict)  # empty = the server told none

    def begin(self) -> None:
        """Forget what an attempt before this one brought."""
        self.num_attempts += 1
        self.status, self.error, self.finish_reason = 0, "", ""
        self.token_times_s, self.usage = [], {}

    def take(self, event: dict[str, Any], now_s: float) -> None:
        """Read one event of the stream."""
        if usage := event.get("usage"):
            self.usage = usage
        if error := event.get("error"):
            self.error = str(error.get("message", error) if isinstance(error, dict) else error)
        for choice in event.get("choices") or ():
            if _has_tokens(choice):
                self.token_times_s.append(now_s)
            if reason := choice.get("finish_reason"):
                self.finish_reason = reason

    @property
    def has_failed(self) -> bool:
        """Whether it counts as an error."""
        return self.ending is Ending.FAILED

    @property
    def num_output_tokens(self) -> int:
        """As the server counted, else the events that brought any."""
        counted = self.usage.get("completion_tokens")
        return counted if isinstance(counted, int) else len(self.token_times_s)

    @property
    def num_prompt_tokens(self) -> int:
        """As the server counted, else as asked for."""
        counted = self.usage.get("prompt_tokens")
        return counted if isinstance(counted, int) else self.request.num_prompt_tokens

    @property
    def ttft_s(self) -> float | None:
        """From when it was due to its first token."""
        return self.token_times_s[0] - self.due_s if self.token_times_s else None

    @property
    def tpot_s(self) -> float | None:
        """Mean time of the tokens after the first; None where there is no second."""
        num_later = self.num_output_tokens - 1
        if num_later < 1 or not self.token_times_s:
            return None
        return (self.token_times_s[-1] - self.token_times_s[0]) / num_later

    @property
    def e2e_s(self) -> float:
        """From when it was due to its end."""
        return self.ended_s - self.due_s


def _has_tokens(choice: dict[str, Any]) -> bool:
    if choice.get("text"):
        return True
    delta = choice.get("delta") or {}
    return any(
        delta.get(name) for name in ("content", "reasoning_content", "reasoning", "tool_calls")
    )
