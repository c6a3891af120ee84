"""A script for the fake router that tells logprobs where they are wanted."""

import math
from collections.abc import Sequence
from typing import Any

from router.logprobs import TokenLogprobs
from router.request import FinishReason, RoutedRequest, TokenBatch
from tests.fake_router import Step
from tests.integration.api.conftest import tokens_of
from tests.tiny_tokenizer import EOS_TOKEN_ID

FIRST, SECOND = tokens_of("ab")


def entry(token_id: int, num_top: int) -> TokenLogprobs:
    """A token of the fake model; its place decides its number."""
    top = ((token_id, -token_id / 100), (FIRST, -7.0), (SECOND, -math.inf))
    return TokenLogprobs(-token_id / 100, 1, top[:num_top])


def scoring(text: str, *, size: int = 1) -> Any:
    """A script that says `text` in steps of `size` tokens, with logprobs where they are wanted."""

    def script(request: RoutedRequest) -> Sequence[Step]:
        sampling = request.sampling
        token_ids = [*tokens_of(text), EOS_TOKEN_ID]
        steps: list[Step] = []
        for start in range(0, len(token_ids), size):
            part = token_ids[start : start + size]
            is_last = start + size >= len(token_ids)
            batch = TokenBatch(part, FinishReason.STOP if is_last else None)
            if sampling.HasField("num_logprobs"):
                batch.logprobs.extend(entry(each, sampling.num_logprobs) for each in part)
            if sampling.HasField("num_prompt_logprobs") and start == 0:
                num_top = sampling.num_prompt_logprobs
                batch.prompt_logprobs.extend(entry(i, num_top) for i in request.token_ids[1:])
            steps.append(batch)
        return steps

    return script
