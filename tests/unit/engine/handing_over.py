"""A hand-over between two engines of one process, by copying blocks."""

from collections.abc import Mapping
from typing import Any

from engine.engine import Engine
from tests.unit.engine.conftest import make_request, run, tokens_by_request


def hand_over(
    prefill: Engine, decode: Engine, prompts: Mapping[str, list[int]], **changes: Any
) -> dict[str, list[int]]:
    """Tokens of each prompt: the first from one engine, the rest from the other."""
    for name, prompt in prompts.items():
        prefill.add_request(make_request(name, prompt, hand_over=True, **changes))
    tokens = tokens_by_request(run(prefill))
    for name, prompt in prompts.items():
        reservation = decode.reserve(make_request(name, prompt, **changes))
        assert reservation is not None
        source = prefill.blocks_of(name)
        start = reservation.num_cached_tokens // decode.config.block_size
        for number in range(start, len(source)):
            target_id = reservation.block_ids[number]
            decode.kv_cache.tensor[target_id] = prefill.kv_cache.tensor[source[number]]
        prefill.release(name)
        assert decode.activate(name, {0: tokens[name][0]}) == []
    for name, rest in tokens_by_request(run(decode)).items():
        tokens[name] += rest
    return tokens
