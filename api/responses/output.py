"""The items of an answer, and the events that tell of them as they grow."""

from dataclasses import dataclass, field

from api.logprobs_formats import Json
from api.parsers.part import Part, PartKind

_PREFIXES = {PartKind.CONTENT: "msg", PartKind.REASONING: "rs", PartKind.CALL: "fc"}


@dataclass(slots=True)
class OutputItem:
    """One message, thought or call."""

    part: Part  # the first piece
    item_id: str
    output_index: int
    texts: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, part: Part, response_id: str, output_index: int) -> "OutputItem":
        """Begin an item with the first piece of it, whose text is still to be added."""
        prefix = _PREFIXES[part.kind]
        return cls(part, f"{prefix}_{response_id}_{output_index}", output_index)

    @property
    def text(self) -> str:
        """All of it so far; of a call, its arguments."""
        return "".join(self.texts)

    def begun(self) -> list[Json]:
        """Return the events that open it."""
        added: Json = {
            "type": "response.output_item.added",
            "output_index": self.output_index,
            "item": self.to_dict("in_progress", is_empty=True),
        }
        if self.part.kind is PartKind.CALL:
            return [added]
        opened = self._event("response.content_part.added") | {"part": self._part("")}
        return [added, opened]

    def grown(self, text: str) -> Json:
        """Take new text and return the event that tells of it."""
        self.texts.append(text)
        match self.part.kind:
            case PartKind.CALL:
                return self._event("response.function_call_arguments.delta") | {"delta": text}
            case PartKind.REASONING:
                return self._event("response.reasoning_text.delta") | {"delta": text}
        return self._event("response.output_text.delta") | {"delta": text, "logprobs": []}

    def ended(self, status: str) -> list[Json]:
        """Return the events that close it."""
        text = self.text
        done: Json = {
            "type": "response.output_item.done",
            "output_index": self.output_index,
            "item": self.to_dict(status),
        }
        if self.part.kind is PartKind.CALL:
            event = self._event("response.function_call_arguments.done")
            return [event | {"name": self.part.name, "arguments": text}, done]
        if self.part.kind is PartKind.REASONING:
            told = self._event("response.reasoning_text.done") | {"text": text}
        else:
            told = self._event("response.output_text.done") | {"text": text, "logprobs": []}
        closed = self._event("response.content_part.done") | {"part": self._part(text)}
        return [told, closed, done]

    def to_dict(self, status: str, *, is_empty: bool = False) -> Json:
        """Return the item as it stands in an answer."""
        text = "" if is_empty else self.text
        if self.part.kind is PartKind.CALL:
            return {
                "id": self.item_id,
                "type": "function_call",
                "status": status,
                "call_id": self.part.call_id,
                "name": self.part.name,
                "arguments": text,
            }
        content = [] if is_empty else [self._part(text)]
        if self.part.kind is PartKind.REASONING:
            return {"id": self.item_id, "type": "reasoning", "summary": [], "content": content}
        return {
            "id": self.item_id,
            "type": "message",
            "status": status,
            "role": "assistant",
            "content": content,
        }

    def _part(self, text: str) -> Json:
        if self.part.kind is PartKind.REASONING:
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def _event(self, kind: str) -> Json:
        event: Json = {
            "type": kind,
            "item_id": self.item_id,
            "output_index": self.output_index,
        }
        return event if self.part.kind is PartKind.CALL else event | {"content_index": 0}
