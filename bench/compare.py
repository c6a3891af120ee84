"""Any OpenAI-compatible servers on the same work, in turn: A B A B, medians, spreads, ratios.

    .venv/bin/python -m bench.compare bench/servers.yaml [--only relevo,vllm] [--work W1,W2]
        [--rounds 3] [--scale 1] [--within SECONDS] [--json FILE] [--plot FILE]

The servers' file says how each is started, or where it runs; `bench/peers.md` says how to install
the others. What each piece of work is: `bench/workloads.py`. Ratios are to the first server.
"""

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.peer_server import PeerServer, read_specs, running
from bench.workloads import Asking, Measured, measure
from load_generator.client import Client
from sim.figures import pyplot, save

WORK = ("W1", "W2", "W3", "W4", "W5")
WARM_UP_SCALE = 0.1
IS_BETTER_HIGH = {"tokens_per_s"}
SHOWN = {
    "W4": ("ttft_ms",),
    "W5": ("itl_p50_ms", "itl_p99_ms", "long_ttft_ms", "tokens_per_s"),
}
USUAL = ("ttft_ms", "tpot_ms", "tokens_per_s")

# work -> server -> what it did, round by round
Results = dict[str, dict[str, list[Measured]]]


async def compare(
    servers: Sequence[PeerServer],
    work: Sequence[str],
    *,
    rounds: int,
    within_s: float = float("inf"),
    scale: float = 1.0,
    seed: int = 1,
) -> Results:
    """Every server does every piece of work in every round; none begins that would end late."""
    models = {}
    for server in servers:  # whoever was frozen before we came stays so until its turn
        server.thaw()
        models[server.name] = await asyncio.to_thread(server.wait_until_ready)
        server.freeze()
    results: Results = {name: {server.name: [] for server in servers} for name in work}
    started_s = time.monotonic()
    longest_s = 0.0  # of a round
    for number in range(rounds + 1):  # the first warms them up: it is small, and not kept
        round_s = time.monotonic()
        if number > 1 and round_s + longest_s - started_s > within_s:
            break
        size = scale if number else scale * WARM_UP_SCALE
        for name in work:
            for server in servers:
                rng = random.Random(f"{seed}/{number}/{name}")
                measured = await _measure(server, models[server.name], name, rng, size)
                if number > 0:
                    results[name][server.name].append(measured)
                print(_line(number, name, server.name, measured), file=sys.stderr, flush=True)
        longest_s = max(longest_s, time.monotonic() - round_s)
    return results


async def _measure(
    server: PeerServer,
    model: str,
    name: str,
    rng: random.Random,
    scale: float,
) -> Measured:
    spec = server.spec
    path = "/v1/chat/completions" if spec.prompts == "chat" else "/v1/completions"
    server.thaw()
    try:
        async with Client(server.url, path=path) as client:
            asking = Asking(
                client=client,
                model=model,
                prompts=spec.prompts,
                extra_body=spec.extra_body,
            )
            return await measure(name, asking, rng, scale=scale)
    finally:
        server.freeze()


def _line(number: int, name: str, server: str, measured: Measured) -> str:
    numbers = ", ".join(f"{what} {value:.1f}" for what, value in measured.numbers.items())
    wrong = f"  WRONG: {measured.wrong}" if measured.wrong else ""
    round_ = f"round {number}" if number else "warm-up"
    return f"{round_} {name} {server}: {numbers}{wrong}"


def mismatches(results: Results) -> list[str]:
    """Where servers did not do the same: failures, or other numbers of tokens than the first."""
    found = []
    for name, by_server in results.items():
        rows = list(by_server.items())
        for server, measured in rows:
            found += [f"{name} {server}: {each.wrong}" for each in measured if each.wrong]
        first, reference = rows[0]
        for server, measured in rows[1:]:
            for ours, theirs in zip(reference, measured, strict=True):
                for kind in ("prompt_tokens", "output_tokens"):
                    if getattr(ours, kind) != getattr(theirs, kind):
                        found.append(
                            f"{name}: {kind} of {first} {sum(getattr(ours, kind))}, of {server} "
                            f"{sum(getattr(theirs, kind))}"
                        )
    return sorted(set(found))


def summary(results: Results) -> dict[str, dict[str, dict[str, dict[str, float]]]]:
    """work -> number -> server -> median, least, most and the ratio to the first server."""
    table: dict[str, dict[str, dict[str, dict[str, float]]]] = {}
    for name, by_server in results.items():
        table[name] = {}
        for what in SHOWN.get(name, USUAL):
            base = 0.0
            table[name][what] = {}
            for server, measured in by_server.items():
                values = [each.numbers[what] for each in measured]
                median = statistics.median(values)
                base = base or median
                table[name][what][server] = {
                    "median": round(median, 2),
                    "least": round(min(values), 2),
                    "most": round(max(values), 2),
                    "ratio": round(median / base, 3) if base else 0.0,
                }
    return table


def print_table(results: Results) -> None:
    """One line for each number, a column for each server."""
    for name, numbers in summary(results).items():
        for what, by_server in numbers.items():
            cells = [
                f"{server} {each['median']:.1f} ({each['least']:.1f} to {each['most']:.1f})"
                f" x{each['ratio']:.2f}"
                for server, each in by_server.items()
            ]
            print(f"{name} {what:<13}", " | ".join(cells))
    for line in mismatches(results):
        print("NOT THE SAME WORK:", line)


def draw(results: Results, path: Path) -> None:
    """Bars of every number, the least and the most as their whiskers."""
    plt = pyplot()
    table = summary(results)
    columns = max(len(numbers) for numbers in table.values())
    shape = (len(table), columns)
    figure, axes = plt.subplots(*shape, figsize=(4 * columns, 2.6 * len(table)), squeeze=False)
    for row, (name, numbers) in zip(axes, table.items(), strict=True):
        for axis in row[len(numbers) :]:
            axis.set_axis_off()
        for axis, (what, by_server) in zip(row, numbers.items(), strict=False):
            _draw_bars(axis, by_server)
            better = "higher" if what in IS_BETTER_HIGH else "lower"
            axis.set_title(f"{name} {what} ({better} is better)", fontsize=9)
    save(figure, path)


def _draw_bars(axis: Any, by_server: Mapping[str, Mapping[str, float]]) -> None:
    medians = [each["median"] for each in by_server.values()]
    below = [each["median"] - each["least"] for each in by_server.values()]
    above = [each["most"] - each["median"] for each in by_server.values()]
    bars = axis.bar(list(by_server), medians, yerr=[below, above], capsize=3)
    axis.bar_label(bars, fmt="%.1f", fontsize=7)
    axis.tick_params(axis="x", rotation=20, labelsize=8)


def to_json(results: Results) -> str:
    """Everything that was measured, and what it comes to."""
    raw = {
        name: {
            server: [
                {
                    **each.numbers,
                    "prompt_tokens": sum(each.prompt_tokens),
                    "output_tokens": sum(each.output_tokens),
                    "wrong": each.wrong,
                }
                for each in measured
            ]
            for server, measured in by_server.items()
        }
        for name, by_server in results.items()
    }
    body = {"summary": summary(results), "mismatches": mismatches(results), "rounds": raw}
    return json.dumps(body, indent=2) + "\n"


def main() -> int:
    """Compare and print; the exit status is 1 where servers did not do the same work."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("servers", type=Path)
    parser.add_argument("--only", default="", help="names, the first is what the others are beside")
    parser.add_argument("--work", default=",".join(WORK))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--scale", type=float, default=1.0, help="of every number of tokens")
    parser.add_argument(
        "--seed", type=int, default=1, help="another one: prompts nobody has cached"
    )
    parser.add_argument("--within", type=float, default=float("inf"), help="seconds")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    specs = read_specs(options.servers)
    names = options.only.split(",") if options.only else list(specs)
    log_folder = Path(tempfile.mkdtemp(prefix="compare-"))
    print(f"logs of the servers: {log_folder}", file=sys.stderr)
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(running(name, specs[name], log_folder)) for name in names]
        work = options.work.split(",")
        comparing = compare(
            servers,
            work,
            rounds=options.rounds,
            within_s=options.within,
            scale=options.scale,
            seed=options.seed,
        )
        results = asyncio.run(comparing)
    print_table(results)
    if options.json:
        options.json.write_text(to_json(results))
    if options.plot:
        draw(results, options.plot)
    return 1 if mismatches(results) else 0


if __name__ == "__main__":
    sys.exit(main())
