"""What attention of one step costs, by the cache's dtype: our call against torch's in bfloat16.

    .venv/bin/python -m bench.attention_calls [--rounds 5] [--threads 2] [--layers 30]

The shape of SmolLM2-135M. Each layer has a cache of its own, so that a step reads as much memory as
a model's does; torch's attention gets keys and values whole and in one piece, without a gather.
"""

import argparse
import time
from collections.abc import Callable

import torch
from torch.nn.functional import scaled_dot_product_attention

from engine.kv_cache import KVCache, KVCacheSpec
from engine.layer_attention import LayerAttention
from engine.native.library import load_library
from engine.native_attention import NativeAttention
from engine.request import Request
from engine.sampling.params import SamplingParams
from engine.schedule import ScheduledRequest

HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 9, 3, 64, 32
# requests, tokens of each in the step, context with them, what of it is the same for all
Case = tuple[int, int, int, int]
CASES: dict[str, Case] = {
    "1 decode at 288": (1, 1, 288, 0),
    "16 decodes at 288": (16, 1, 288, 0),
    "16 decodes at 1,500": (16, 1, 1500, 0),
    "16 decodes at 1,124, 1,024 shared": (16, 1, 1124, 1024),
    "prompt of 128": (1, 128, 128, 0),
    "prompt of 2,000": (1, 2000, 2000, 0),
}


def main() -> None:
    """Print a line for each case and dtype: milliseconds of all layers, the best round."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", default=5, type=int)
    parser.add_argument("--threads", default=2, type=int)
    parser.add_argument("--layers", default=30, type=int)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    assert load_library(), "make setup builds it"
    for name, case in CASES.items():
        ways = {
            "bfloat16 cache": _ours(case, arguments.layers, "bfloat16"),
            "float32 cache": _ours(case, arguments.layers, "float32"),
            "torch in bfloat16": _torch(case, arguments.layers),
        }
        best = dict.fromkeys(ways, float("inf"))
        for _ in range(arguments.rounds):
            for way, attend in ways.items():
                started_at_s = time.perf_counter()
                for layer in range(arguments.layers):
                    attend(layer)
                best[way] = min(best[way], time.perf_counter() - started_at_s)
        print(f"{name:33}", *(f"{way} {best_s * 1e3:.2f} ms" for way, best_s in best.items()))


def _ours(case: Case, num_layers: int, dtype: str) -> Callable[[int], object]:
    num_requests, num_tokens, context, num_shared = case
    count, shared = -(-context // BLOCK_SIZE), num_shared // BLOCK_SIZE
    spec = KVCacheSpec(
        num_layers=num_layers,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        block_size=BLOCK_SIZE,
        dtype=dtype,
        device="cpu",
    )
    cache = KVCache(spec, num_requests * count)
    cache.tensor.normal_()
    scheduled = []
    for number in range(num_requests):
        request = Request(
            request_id=str(number),
            token_ids=[0] * context,
            num_prompt_tokens=context,
            sampling_params=SamplingParams(max_tokens=1),
        )
        own = range(number * count + shared, (number + 1) * count)
        request.block_ids = [*range(shared), *own]
        scheduled.append(ScheduledRequest(request=request, start=context - num_tokens, end=context))
    attention = NativeAttention.plan(scheduled, cache)
    query, key, value = (
        torch.randn(num_requests * num_tokens, number, HEAD_DIM).transpose(0, 1)
        for number in (HEADS, KV_HEADS, KV_HEADS)
    )
    return lambda layer: attention.attend(LayerAttention(layer, HEAD_DIM**-0.5), query, key, value)


def _torch(case: Case, num_layers: int) -> Callable[[int], object]:
    num_requests, num_tokens, context, _ = case
    query = torch.randn(num_requests, HEADS, num_tokens, HEAD_DIM).bfloat16()
    kv = torch.randn(num_layers, 2, num_requests, KV_HEADS, context, HEAD_DIM).bfloat16()
    return lambda layer: scaled_dot_product_attention(
        query, kv[layer, 0], kv[layer, 1], is_causal=num_tokens > 1, enable_gqa=True
    )


if __name__ == "__main__":
    main()
