"""When the cost formula hands a prompt over to a prefill worker: a map over prompt and load.

    .venv/bin/python -m bench.crossover [--output crossover.png]

One prefill and one decode worker of equal speed with a link, as plain data. For each prompt length,
share of it that the decode worker caches, and number of its running streams, the two choices are
costed and the cheaper one is drawn. There is no threshold anywhere: the border is where both costs
are equal.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl

from router.cost import Cost, Need, decode_part, local_cost, pair_cost
from router.worker_view import DECODE, PREFILL, LinkView, WorkerKey, WorkerView

NUM_TOKENS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
CACHED_SHARES = (0.0, 0.25, 0.5, 0.75, 0.9, 0.97, 0.99)
NUM_STREAMS = (0, 1, 2, 4, 8, 16, 32)
NUM_OUTPUT_TOKENS = 200

# Of the size of an 8B model on an H100 with a 25 GB/s link.
PREFILL_TOKENS_PER_S = 20_000.0
STEP_S = 0.008
KV_BYTES_PER_TOKEN = 131_072
LINK = LinkView(bandwidth_bytes_per_s=25e9, latency_s=0.002, queued_bytes=0)
PREFILL_KEY = WorkerKey("prefill-0", 1)


def worker(pool: str, num_running: int = 0) -> WorkerView:
    """One worker with this many running streams."""
    return WorkerView(
        key=PREFILL_KEY if pool == PREFILL else WorkerKey("decode-0", 1),
        pool=pool,
        max_num_seqs=64,
        max_model_len=131_072,
        max_num_batched_tokens=2048,
        block_size=32,
        num_kv_blocks=16_384,
        kv_bytes_per_token=KV_BYTES_PER_TOKEN,
        num_running=num_running,
        num_free_blocks=16_384,
        prefill_tokens_per_s=PREFILL_TOKENS_PER_S,
        step_s=STEP_S,
        links={PREFILL_KEY: LINK} if pool == DECODE else {},
    )


def costs(num_tokens: int, cached_share: float, num_streams: int) -> tuple[Cost, Cost]:
    """Return what a hand-over costs, and what the decode worker alone costs."""
    need = Need(num_tokens=num_tokens, num_output_tokens=NUM_OUTPUT_TOKENS)
    num_cached = int(num_tokens * cached_share)
    decode = worker(DECODE, num_streams)
    part = decode_part(need, decode, num_cached=num_cached)
    pair = pair_cost(need, worker(PREFILL), decode, LINK, part, num_cached_decode=num_cached)
    return pair, local_cost(need, decode, part, num_cached_decode=num_cached)


def advantages(num_streams: int) -> list[list[float]]:
    """What a hand-over saves, by cached share and prompt length."""
    return [
        [saved_share(num_tokens, share, num_streams) for num_tokens in NUM_TOKENS]
        for share in CACHED_SHARES
    ]


def saved_share(num_tokens: int, cached_share: float, num_streams: int) -> float:
    """What a hand-over saves, as a share of the dearer choice; negative when it is the dearer."""
    pair, local = costs(num_tokens, cached_share, num_streams)
    return float((local.total_s - pair.total_s) / max(local.total_s, pair.total_s))


def crossover_tokens(cached_share: float, num_streams: int) -> int | None:
    """Shortest prompt that is handed over; None if none is."""
    for num_tokens in NUM_TOKENS:
        if saved_share(num_tokens, cached_share, num_streams) > 0.0:
            return num_tokens
    return None


def main() -> None:
    """Print the table and draw the map."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("crossover.png"))
    arguments = parser.parse_args()
    print("shortest prompt (tokens) that is handed over; -: none up to", NUM_TOKENS[-1])
    print("streams  " + "".join(f"{share:>9.0%}" for share in CACHED_SHARES) + "  cached on decode")
    for num_streams in NUM_STREAMS:
        row = [crossover_tokens(share, num_streams) for share in CACHED_SHARES]
        print(f"{num_streams:>7}  " + "".join(f"{tokens or '-':>9}" for tokens in row))
    draw(arguments.output, NUM_STREAMS[1:])
    print(f"drawn to {arguments.output}")


def draw(path: Path, all_num_streams: Sequence[int]) -> None:
    """One map for each number of streams: blue where the prompt is handed over."""
    mpl.use("agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415 - after the choice of its backend

    figure, axes = plt.subplots(2, -(-len(all_num_streams) // 2), figsize=(13, 6), sharey=True)
    for axis, num_streams in zip(axes.flat, all_num_streams, strict=False):
        grid = advantages(num_streams)
        picture = axis.imshow(grid, origin="lower", aspect="auto", cmap="RdBu", vmin=-1, vmax=1)
        axis.contour(grid, levels=[0.0], colors="black")
        axis.set_title(f"{num_streams} running streams")
        axis.set_xticks(range(len(NUM_TOKENS)), [str(n) for n in NUM_TOKENS], rotation=60)
        axis.set_yticks(range(len(CACHED_SHARES)), [f"{share:.0%}" for share in CACHED_SHARES])
        figure.colorbar(picture, ax=axis, label="share saved by a hand-over")
    figure.supxlabel("prompt tokens")
    figure.supylabel("of it cached on the decode worker")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    main()
