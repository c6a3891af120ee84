"""Logprobs as the gRPC API writes them."""

from relevo.v1 import inference_pb2

from api.logprobs_formats import finite
from api.token_text import TokenBytes, token_text
from router.logprobs import TokenLogprobs


def to_message(
    token_id: int, logprobs: TokenLogprobs | None, token_bytes: TokenBytes
) -> inference_pb2.TokenLogprobs:
    """Return one token's message; the first token of an echoed prompt has a rank of 0."""
    message = inference_pb2.TokenLogprobs(token_id=token_id, text=token_text(token_bytes(token_id)))
    if logprobs is not None:
        message.logprob = finite(logprobs.logprob)
        message.rank = logprobs.rank
        message.top.extend(
            inference_pb2.TokenLogprobs.Candidate(
                token_id=top_id, text=token_text(token_bytes(top_id)), logprob=finite(logprob)
            )
            for top_id, logprob in logprobs.top
        )
    return message
