"""The input: JSON lines {custom_id, method, url, body}, as OpenAI's Batch API takes them."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")


@dataclass(frozen=True, slots=True, kw_only=True)
class InputLine:
    """One request, or what is wrong with it."""

    custom_id: str
    url: str = ""
    body: dict[str, Any] | None = None
    fault: str = ""  # why it cannot be sent


class InputFile:
    """A file of requests, read twice: once to check all ids, then line by line."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def check(self) -> set[str]:
        """All ids; ValueError names the first line without one of its own."""
        seen: dict[str, int] = {}
        for number, line in self._lines():
            custom_id = _custom_id(line)
            if not custom_id:
                raise ValueError(
                    f"{self.path}, line {number}: expected a JSON object with a custom_id"
                )
            if custom_id in seen:
                raise ValueError(
                    f"{self.path}, line {number}: custom_id {custom_id!r} is that of line "
                    f"{seen[custom_id]} too"
                )
            seen[custom_id] = number
        if not seen:
            raise ValueError(f"{self.path} has no requests")
        return set(seen)

    def lines(self) -> Iterator[InputLine]:
        """Every request, those that cannot be sent with their fault."""
        for _, line in self._lines():
            yield _read(line)

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        try:
            with self.path.open("rb") as file:
                for number, line in enumerate(file, start=1):
                    if line.strip():
                        yield number, line
        except OSError as error:
            raise ValueError(f"{self.path} cannot be read: {error.strerror}") from error


def _custom_id(line: bytes) -> str:
    try:
        custom_id = orjson.loads(line)["custom_id"]
    except (ValueError, KeyError, TypeError):
        return ""
    return custom_id if isinstance(custom_id, str) else ""


def _read(line: bytes) -> InputLine:
    fields = orjson.loads(line)
    custom_id, url, body = fields["custom_id"], fields.get("url"), fields.get("body")
    fault = ""
    if fields.get("method") != "POST":
        fault = f"method must be POST, got {fields.get('method')!r}"
    elif url not in URLS:
        fault = f"url must be one of {', '.join(URLS)}, got {url!r}"
    elif not isinstance(body, dict):
        fault = f"body must be an object, got {type(body).__name__}"
    elif body.get("stream"):
        fault = "body.stream must be left out: a batch has whole answers"
    if fault:
        return InputLine(custom_id=custom_id, fault=fault)
    return InputLine(custom_id=custom_id, url=url, body=body)
