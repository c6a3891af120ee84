"""Reads a JSON body within bounds that no client can exceed at our cost."""

import asyncio

from starlette.requests import ClientDisconnect, Request

from api.errors import ApiError, Verdict, invalid
from api.json_text import RepeatedNameError, parse_json

MAX_BODY_BYTES = 4 * 1024 * 1024
BODY_TIMEOUT_S = 30.0
MAX_FIELDS = 256
# Reading this much takes a millisecond; of more the interpreter does the least part.
MAX_INLINE_BYTES = 64 * 1024


async def read_json_object(request: Request) -> dict[str, object]:
    """Return the body as an object; ApiError when it is too big, too slow, too deep or no JSON."""
    return await parse_json_object(await read_body(request))


async def parse_json_object(body: bytes) -> dict[str, object]:
    """Return a body as an object; ApiError when it is too deep or no JSON."""
    try:
        if len(body) <= MAX_INLINE_BYTES:
            value = parse_json(body)
        else:
            value = await asyncio.to_thread(parse_json, body)
    except RepeatedNameError as error:
        raise invalid(f"The body cannot be read: {error}", error.name) from None
    except ValueError as error:
        raise invalid(f"The body cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise invalid("The body must be a JSON object")
    if len(value) > MAX_FIELDS:
        raise invalid(f"The body must have at most {MAX_FIELDS} fields, got {len(value)}")
    return value


async def read_body(request: Request) -> bytes:
    """Return the bytes; ApiError when there are too many or they come too slowly."""
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
