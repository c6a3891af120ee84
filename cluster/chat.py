"""`relevo chat`: talk to the served model over its OpenAI-compatible front."""

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx

from cluster.http_client import FrontError, get_json, not_reached, open_client, raise_for_error

PATH = "/v1/chat/completions"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatSettings:
    """How the person wants to talk."""

    url: str
    api_key: str = ""
    max_tokens: int = 512
    temperature: float = 0.2
    stats: bool = False


@dataclass(slots=True)
class Answer:
    """What came of one question."""

    text: str = ""
    usage: dict[str, Any] = field(default_factory=dict)
    first_token_s: float | None = None  # from sending to the first text
    total_s: float = 0.0
    finish_reason: str = ""


def run(settings: ChatSettings, *, quick: str) -> int:
    """Ask once, or until the person leaves; the exit status."""
    try:
        with open_client(settings.url, api_key=settings.api_key) as client:
            model = get_json(client, "/v1/models")["data"][0]["id"]
            if quick:
                _ask(client, settings, model, [{"role": "user", "content": quick}])
                return 0
            sys.stdout.write(f"{model} at {settings.url}; Ctrl-D ends\n")
            _converse(client, settings, model)
            return 0
    except FrontError as error:
        sys.stderr.write(f"relevo chat: {error}\n")
        return 1


def _converse(client: httpx.Client, settings: ChatSettings, model: str) -> None:
    messages: list[dict[str, str]] = []
    while True:
        try:
            question = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            sys.stdout.write("\n")
            return
        if not question:
            continue
        asked = [*messages, {"role": "user", "content": question}]
        try:
            answer = _ask(client, settings, model, asked)
        except FrontError as error:
            # One failed question does not end the conversation; it is not remembered.
            sys.stderr.write(f"relevo chat: {error}\n")
            continue
        except KeyboardInterrupt:
            sys.stdout.write("\n")
            continue
        messages = [*asked, {"role": "assistant", "content": answer.text}]


def _ask(
    client: httpx.Client, settings: ChatSettings, model: str, messages: list[dict[str, str]]
) -> Answer:
    body = {
        "model": model,
        "messages": messages,
        "max_tokens": settings.max_tokens,
        "temperature": settings.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    answer, started_s = Answer(), time.monotonic()
    try:
        with client.stream("POST", PATH, json=body) as response:
            if not response.is_success:
                response.read()
            raise_for_error(response)
            for text in _texts(response, answer):
                if answer.first_token_s is None:
                    answer.first_token_s = time.monotonic() - started_s
                answer.text += text
                sys.stdout.write(text)
                sys.stdout.flush()
    except httpx.TransportError as error:
        sys.stdout.write("\n")
        raise not_reached(client, error) from error
    answer.total_s = time.monotonic() - started_s
    sys.stdout.write("\n")
    if settings.stats:
        sys.stdout.write(f"[{describe(answer)}]\n")
    return answer


def _texts(response: httpx.Response, answer: Answer) -> Iterator[str]:
    """Yield the text of each chunk; usage and finish reason go into the answer."""
    for line in response.iter_lines():
        if not line.startswith("data: ") or line == "data: [DONE]":
            continue
        chunk = json.loads(line.removeprefix("data: "))
        if "error" in chunk:
            raise FrontError(chunk["error"].get("message", "the stream broke"))
        answer.usage = chunk.get("usage") or answer.usage
        for choice in chunk.get("choices", ()):
            answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
            if text := choice.get("delta", {}).get("content"):
                yield text


def describe(answer: Answer) -> str:
    """What an answer took, in one line."""
    usage = answer.usage
    tokens = usage.get("completion_tokens", 0)
    decode_s = answer.total_s - (answer.first_token_s or 0.0)
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    parts = [
        f"TTFT {1000 * (answer.first_token_s or 0.0):.0f} ms",
        f"{(tokens - 1) / decode_s:.1f} tokens/s" if tokens > 1 and decode_s > 0 else "",
        f"{tokens} tokens in {answer.total_s:.2f} s",
        f"prompt {usage.get('prompt_tokens', 0)} tokens, {cached} cached",
    ]
    parts += [
        f"{name.removesuffix('_time').replace('_', ' ')} {1000 * usage[name]:.0f} ms"
        for name in ("queue_time", "prompt_time", "kv_transfer_time", "completion_time")
        if isinstance(usage.get(name), int | float)
    ]
    return ", ".join(part for part in [*parts, answer.finish_reason] if part)
