"""Plain worker views for tests of cost and policy."""

from typing import Any

from router.worker_view import DECODE, PREFILL, LinkView, WorkerKey, WorkerView

LINK = LinkView(bandwidth_bytes_per_s=1e8, latency_s=0.001, queued_bytes=0)
FACTS: dict[str, Any] = {
    "max_num_seqs": 4,
    "max_model_len": 4096,
    "max_num_batched_tokens": 128,
    "block_size": 16,
    "num_kv_blocks": 256,
    "kv_bytes_per_token": 1000,
    "num_free_blocks": 256,
    "prefill_tokens_per_s": 1000.0,
    "step_s": 0.01,
}


def prefill(number: int = 0, **facts: Any) -> WorkerView:
    return WorkerView(key=WorkerKey(f"prefill-{number}", 1), pool=PREFILL, **{**FACTS, **facts})


def decode(number: int = 0, *, peers: int = 1, **facts: Any) -> WorkerView:
    links = {WorkerKey(f"prefill-{n}", 1): LINK for n in range(peers)}
    key = WorkerKey(f"decode-{number}", 1)
    return WorkerView(key=key, pool=DECODE, **{**FACTS, "links": links, **facts})
