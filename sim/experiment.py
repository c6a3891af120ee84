"""What can be asked of the simulator: compare policies, find the saturation, the best split."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from sim.cluster import ClusterSpec, Run, SimCluster
from sim.report import Objectives, Report, make_report
from sim.trace import Trace

SATURATION_WINDOW = (0.1, 0.9)  # of the requests: neither filling up nor running dry


def compare(
    spec: ClusterSpec, trace: Trace, policies: Iterable[str], *, seed: int
) -> Iterator[Run]:
    """One run of each policy, the same requests at the same times."""
    for policy in policies:
        yield run_policy(spec, trace, policy, seed=seed)


def run_policy(spec: ClusterSpec, trace: Trace, policy: str, *, seed: int) -> Run:
    """One run, checked: nothing may be left of any request."""
    cluster = SimCluster(spec, policy, seed=seed)
    run = cluster.run(trace)
    cluster.check_integrity()
    return run


def find_saturation(spec: ClusterSpec, trace: Trace, policy: str, *, seed: int) -> float:
    """Requests per second that end while there are always more: all arrive at once."""
    run = run_policy(spec, trace.at_rate(float("inf")), policy, seed=seed)
    ends_s = sorted(each.finished_s for each in run.flights if each.finished_s is not None)
    first, last = (int(share * (len(ends_s) - 1)) for share in SATURATION_WINDOW)
    if ends_s[last] <= ends_s[first]:
        raise ValueError(f"{len(ends_s)} requests are too few to tell what saturates the cluster")
    return (last - first) / (ends_s[last] - ends_s[first])


def search_split(
    spec: ClusterSpec,
    trace: Trace,
    policy: str,
    objectives: Objectives,
    *,
    num_workers: int,
    seed: int,
) -> list[tuple[int, int, Report]]:
    """(prefill, decode, report) of the splits tried: coarse steps, then around the best."""
    step = max(num_workers // 8, 1)
    fewest = 1 if spec.local_prefill == "never" else 0
    tried: dict[int, Report] = {}

    def try_splits(numbers: Iterable[int]) -> int:
        for num_prefill in numbers:
            if fewest <= num_prefill < num_workers and num_prefill not in tried:
                split = replace(spec, num_prefill=num_prefill, num_decode=num_workers - num_prefill)
                run = run_policy(split, trace, policy, seed=seed)
                tried[num_prefill] = make_report(run, objectives)
        return max(tried, key=lambda number: _merit(tried[number]))

    best = try_splits(range(fewest, num_workers, step))
    while step > 1:
        step = -(-step // 2) if step > 2 else 1
        best = try_splits((best - step, best + step))
    try_splits((best - 1, best + 1))
    return [(number, num_workers - number, tried[number]) for number in sorted(tried)]


def best_split(splits: Sequence[tuple[int, int, Report]]) -> tuple[int, int, Report]:
    """The one with the most good requests; among equals the fastest."""
    return max(splits, key=lambda split: _merit(split[2]))


def _merit(report: Report) -> tuple[float, float]:
    return report.good_share, -report.ttft_s.p90
