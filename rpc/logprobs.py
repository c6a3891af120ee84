"""How likely tokens were, as it travels between workers; the router reads the message itself."""

from collections.abc import Sequence

from relevo.v1 import common_pb2

from engine.token_logprobs import TokenLogprobs


def logprobs_to_proto(start_position: int, entries: Sequence[TokenLogprobs]) -> common_pb2.Logprobs:
    """Return the message for entries at consecutive positions, all with as many candidates."""
    return common_pb2.Logprobs(
        start_position=start_position,
        logprobs=[entry.logprob for entry in entries],
        ranks=[entry.rank for entry in entries],
        num_top=len(entries[0].top) if entries else 0,
        top_token_ids=[token_id for entry in entries for token_id, _ in entry.top],
        top_logprobs=[logprob for entry in entries for _, logprob in entry.top],
    )


def first_logprobs(message: common_pb2.Logprobs) -> TokenLogprobs | None:
    """Return the first entry of a message, or None when it has none or is cut short."""
    ids, values = message.top_token_ids[: message.num_top], message.top_logprobs[: message.num_top]
    if not message.logprobs or not message.ranks or len(ids) != len(values):
        return None
    return TokenLogprobs(
        message.logprobs[0], message.ranks[0], tuple(zip(ids, values, strict=True))
    )
