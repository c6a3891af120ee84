"""Scheduling a step while the one before it runs.

    launch n -> schedule and launch n + 1 -> land n -> schedule and launch n + 2 -> land n + 1 ..

While n + 1 is scheduled the requests look as if n had landed: each has one token more, whose value
only the device knows. Then they look again as they did, and n lands as any step does. What n + 1
computed for a request that n ended is dropped; the blocks it wrote are written by others only after
it, since the device keeps the order.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from engine.block_pool import BlockPool
from engine.request import Request
from engine.request_queues import RequestQueues
from engine.schedule import ScheduledRequest
from engine.stopping import may_go_on

_PENDING_TOKEN = 0  # stands in for an id; the device puts the real one in its place


def is_steady(queues: RequestQueues, pool: BlockPool) -> bool:
    """Whether the next schedule only goes on with those who run: nobody comes, nobody must go."""
    if queues.activated or pool.num_available < queues.num_growing:
        return False
    if not queues.waiting:
        return True
    head = queues.waiting[0]
    return not queues.has_place_for(head) and not queues.preemptable_for(head)


@contextmanager
def as_if_landed(entries: Sequence[ScheduledRequest], *, max_model_len: int) -> Iterator[None]:
    """Give each request what its share of a running step will have given it, for a while."""
    before = [(entry.request, entry.request.num_computed_tokens) for entry in entries]
    with_token: list[Request] = []
    for entry in entries:
        entry.request.num_computed_tokens = entry.end
        # One that surely ends is left without: so it is given no share.
        if entry.samples and may_go_on(entry.request, max_model_len=max_model_len):
            with_token.append(entry.request)
    for request in with_token:
        request.token_ids.append(_PENDING_TOKEN)
    try:
        yield
    finally:
        for request in with_token:
            request.token_ids.pop()
        for request, num_computed_tokens in before:
            request.num_computed_tokens = num_computed_tokens
