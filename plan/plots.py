"""A plan as one picture: what fits, how fast it is, and where the memory goes."""

from pathlib import Path
from typing import Any

from plan.plan import Plan
from sim.figures import pyplot, save

_GIB = 1024**3


def draw_plan(plan: Plan, path: Path) -> None:
    """A PNG of three parts."""
    figure, axes = pyplot().subplots(1, 3, figsize=(15, 4.5))
    _draw_concurrency(axes[0], plan)
    _draw_decoding(axes[1], plan)
    _draw_memory(axes[2], plan)
    figure.suptitle(f"{plan.source} ({plan.model_type})", fontsize=10)
    save(figure, path)


def _draw_concurrency(axis: Any, plan: Plan) -> None:
    lens = [row.context_len for row in plan.contexts]
    axis.plot(lens, [row.num_fitting for row in plan.contexts], marker="o", label="blocks fit")
    axis.plot(lens, [row.max_concurrency for row in plan.contexts], marker="s", label="run at once")
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xlabel("tokens of each request")
    axis.set_ylabel("requests of one worker")
    axis.grid(alpha=0.3)
    axis.legend()


def _draw_decoding(axis: Any, plan: Plan) -> None:
    most = plan.decode_memory.max_num_seqs
    for row in plan.contexts:
        counts = sorted(
            {min(2**power, row.max_concurrency) for power in range(most.bit_length() + 1)}
        )
        steps_s = [plan.decode_speed.decode_step_s(count, row.context_len) for count in counts]
        rates = [count / step_s for count, step_s in zip(counts, steps_s, strict=True)]
        times_ms = [step_s * 1e3 for step_s in steps_s]
        axis.plot(times_ms, rates, marker=".", label=f"{row.context_len:,} tokens")
    axis.axvline(plan.work.tpot_s * 1e3, color="black", linestyle=":", label="objective")
    axis.set_xscale("log")
    axis.set_xlabel("time per token (ms)")
    axis.set_ylabel("tokens per second of a decode worker")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)


def _draw_memory(axis: Any, plan: Plan) -> None:
    pools = {"prefill": plan.prefill_memory, "decode": plan.decode_memory}
    bottoms = [0.0, 0.0]
    for name in ("weights_bytes", "kv_bytes", "buffer_bytes", "step_bytes"):
        sizes = [getattr(memory, name) / _GIB for memory in pools.values()]
        axis.bar(list(pools), sizes, bottom=bottoms, label=name.removesuffix("_bytes"))
        bottoms = [bottom + size for bottom, size in zip(bottoms, sizes, strict=True)]
    axis.set_ylabel("GiB of a worker")
    axis.legend()
