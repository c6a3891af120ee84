"""Reads a JSON body within bounds that no client can exceed at our cost."""

import asyncio

import numpy as np
import orjson
from starlette.requests import ClientDisconnect, Request

from api.errors import ApiError, Verdict, invalid

MAX_BODY_BYTES = 4 * 1024 * 1024
MAX_DEPTH = 64
BODY_TIMEOUT_S = 30.0

_MARKS = b'"[]{}'
_NOT_MARKS = bytes(set(range(256)) - set(_MARKS))


async def read_json_object(request: Request) -> dict[str, object]:
    """Return the body as an object; ApiError when it is too big, too slow, too deep or no JSON."""
    body = await _read(request)
    if has_too_deep_nesting(body):
        raise invalid(f"The body is nested deeper than {MAX_DEPTH} levels")
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        # The parser's message is about places and kinds; the text itself stays out of it.
        raise invalid(f"The body is not valid JSON: {error.msg[:200]}") from None
    if not isinstance(value, dict):
        raise invalid("The body must be a JSON object")
    return value


def has_too_deep_nesting(body: bytes) -> bool:
    """Judge the depth before any object is built; brackets inside strings do not count.

    A few passes over the bytes, all of them in C: the body may be hostile and the loop must go on.
    """
    if body.count(b"[") + body.count(b"{") <= MAX_DEPTH:
        return False
    # Escaped backslashes go first, so that what then stands before a quote does escape it.
    text = body.replace(b"\\\\", b"").replace(b'\\"', b"").translate(None, _NOT_MARKS)
    marks = np.frombuffer(text, dtype=np.uint8)
    is_quote = marks == ord('"')
    is_outside = np.cumsum(is_quote, dtype=np.int32) % 2 == 0
    steps = np.zeros(len(marks), dtype=np.int8)
    steps[((marks == ord("[")) | (marks == ord("{"))) & is_outside] = 1
    steps[((marks == ord("]")) | (marks == ord("}"))) & is_outside] = -1
    return int(np.cumsum(steps, dtype=np.int32).max()) > MAX_DEPTH


async def _read(request: Request) -> bytes:
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length[:20]) > MAX_BODY_BYTES:
        raise _too_large()
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for chunk in request.stream():
                body += chunk
                if len(body) > MAX_BODY_BYTES:
                    raise _too_large()
    except TimeoutError:
        raise invalid(f"The body did not arrive within {BODY_TIMEOUT_S:g} s") from None
    except ClientDisconnect:
        raise ApiError(Verdict.CANCELLED, "The client went away") from None
    return bytes(body)


def _too_large() -> ApiError:
    return ApiError(Verdict.BODY_TOO_LARGE, f"The body is larger than {MAX_BODY_BYTES} bytes")
