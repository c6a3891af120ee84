"""Refuses over HTTP what an overloaded ingress could only refuse later, before it costs anything.

To parse, lay out and tokenise a request takes many times what it takes to see that no room is left
for it. How urgent it is stands in its body; nearly all say nothing of it, which needs no parser.
"""

import re

from starlette.requests import Request

from api.caller import Caller
from api.http_body import read_body
from api.serving import Serving

# The name of the field, or an escape that could hide a letter of it.
_MAYBE_PRIORITY = re.compile(rb"priority|\\u00[67]")


async def body_of_admitted(request: Request, caller: Caller, serving: Serving) -> bytes | None:
    """Return the body where it had to be read, else None; QueueFull when there is no room for it.

    A request that asks for a priority of its own is let through: its class may have room.
    """
    if serving.has_room(caller):
        return None
    body = await read_body(request)
    if not _MAYBE_PRIORITY.search(body):
        serving.check_room(caller)
    return body
