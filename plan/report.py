"""A plan as tables for people."""

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from plan.memory import MemoryPlan
from plan.plan import Plan

_MIB = 1024 * 1024


def show(plan: Plan, console: Console) -> None:
    """Everything, top down."""
    parameters = plan.parameters
    active = f", {parameters.active / 1e6:,.1f} M active" if parameters.experts else ""
    console.print(
        f"[bold]{escape(plan.source)}[/]: {plan.model_type}, "
        f"{parameters.total / 1e6:,.1f} M parameters{active}"
    )
    console.print(_memory_table(plan))
    console.print(_context_table(plan))
    work = plan.work
    console.print(
        f"\n{work.num_input_tokens:,} tokens in and {work.num_output_tokens:,} out, at most "
        f"{work.tpot_s * 1e3:g} ms per token"
    )
    console.print(_split_table(plan))
    _show_costs(plan, console)
    for warning in plan.warnings:
        console.print(f"[yellow]warning[/] {escape(warning)}")


def _memory_table(plan: Plan) -> Table:
    same = plan.prefill_memory == plan.decode_memory
    pools = {"each worker": plan.decode_memory}
    if not same:
        pools = {"prefill worker": plan.prefill_memory, "decode worker": plan.decode_memory}
    table = _table("Memory", "", *pools)
    columns = [_memory_column(memory) for memory in pools.values()]
    for name in columns[0]:
        table.add_row(name, *(column[name] for column in columns))
    return table


def _memory_column(memory: MemoryPlan) -> dict[str, str]:
    weights = f"{_size(memory.weights_bytes)}{' (bfloat16)' if memory.is_narrow else ''}"
    return {
        "computed in": memory.dtype,
        "weights": weights,
        "KV per token": f"{memory.kv_bytes_per_token / 1024:,.1f} KiB",
        "KV blocks": f"{memory.num_blocks:,} of {memory.block_size} tokens",
        "KV pool": _size(memory.kv_bytes),
        "run-time buffers": _size(memory.buffer_bytes),
        "a step takes at most, besides": _size(memory.step_bytes),
        "longest request": f"{memory.max_model_len:,} tokens",
        "such requests at once": f"{memory.max_concurrency(memory.max_model_len):,}"
        f" of {memory.max_num_seqs:,}",
    }


def _context_table(plan: Plan) -> Table:
    table = _table(
        "By length of the requests",
        *("tokens", "fit", "at once", "prompt s", "prompt tok/s", "hand-over ms", "its tail ms"),
        *("alone ms/tok", "full ms/tok", "decode tok/s"),
    )
    for row in plan.contexts:
        table.add_row(
            f"{row.context_len:,}",
            f"{row.num_fitting:,}",
            f"{row.max_concurrency:,}",
            f"{row.prefill_s:,.3f}",
            f"{row.prefill_tokens_per_s:,.0f}",
            f"{row.link_s * 1e3:,.1f}",
            f"{row.link_tail_s * 1e3:,.1f}",
            f"{row.single_tpot_s * 1e3:,.1f}",
            f"{row.full_tpot_s * 1e3:,.1f}",
            f"{row.decode_tokens_per_s:,.0f}",
        )
    return table


def _split_table(plan: Plan) -> Table:
    split = plan.split
    num_workers = split.num_prefill + split.num_decode
    table = _table("Pools", "", "workers", "requests/s", "at once each", "ms/tok")
    for name, number, pool in (
        ("prefill", split.num_prefill, split.prefill),
        ("decode", split.num_decode, split.decode),
        ("aggregated instead", num_workers, split.aggregated),
    ):
        tpot = f"{pool.tpot_s * 1e3:,.1f}" if pool.tpot_s else ""
        rate = f"{number * pool.rate:,.2f}"
        table.add_row(name, f"{number:,}", rate, f"{pool.num_seqs:,}", tpot)
    return table


def _show_costs(plan: Plan, console: Console) -> None:
    split = plan.split
    console.print(
        f"recommended: [bold]{split.num_prefill}P {split.num_decode}D[/], {split.rate:,.2f} "
        f"requests/s ({split.prefill_per_decode:.2f} prefill workers per decode worker); "
        f"aggregated {split.aggregated_rate:,.2f}; first token after {split.ttft_s:,.3f} s"
    )
    if plan.costs is not None:
        console.print(
            f"cost per million tokens: {plan.costs.input:,.3f} in, {plan.costs.output:,.3f} out; "
            f"{plan.costs.blended:,.3f} of all tokens with this split"
        )


def _table(title: str, *columns: str) -> Table:
    table = Table(*columns, title=title, title_justify="left", box=None, header_style="bold")
    for column in table.columns[1:]:
        column.justify = "right"
    return table


def _size(num_bytes: float) -> str:
    if num_bytes >= 10 * 1024 * _MIB:
        return f"{num_bytes / (1024 * _MIB):,.1f} GiB"
    return f"{num_bytes / _MIB:,.1f} MiB"
