"""The deadline that an HTTP client gives its request; gRPC has its own."""

import math

from starlette.datastructures import Headers

from api.errors import invalid, show

TIMEOUT_HEADER = "x-relevo-timeout-s"


def read_timeout_s(headers: Headers) -> float | None:
    """Return the seconds from the request's arrival to its end; None when it names none."""
    text = headers.get(TIMEOUT_HEADER)
    if text is None:
        return None
    try:
        timeout_s = float(text)
    except ValueError:
        timeout_s = math.nan
    if not 0 < timeout_s < math.inf:
        raise invalid(
            f"Got {TIMEOUT_HEADER}: {show(text)} but expected seconds above 0", TIMEOUT_HEADER
        )
    return timeout_s
