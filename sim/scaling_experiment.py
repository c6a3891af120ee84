"""What autoscaling costs and gives on a trace: worker-seconds beside good requests."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace

from router.scaling.config import ScalingConfig
from router.worker_view import DECODE, PREFILL
from sim.cluster import ClusterSpec, SimCluster
from sim.report import Objectives, Percentiles, make_report
from sim.scaling import OngoingRequests, PoolKeeper, TokenSignals
from sim.trace import Trace

FIXED = "fixed"
EQUAL_SHARE = 0.005  # of the requests: so much less goodput still counts as equal
# Requests for each worker that Serve's policy is tried with; its own default is 2.
SERVE_PREFILL_TARGETS = (0.5, 1.0, 2.0)
SERVE_DECODE_TARGETS = (4.0, 8.0, 16.0, 32.0)
ScalingPolicy = TokenSignals | OngoingRequests


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingReport:
    """Numbers of one policy on one trace."""

    policy: str
    good_share: float
    goodput: float
    ttft_s: Percentiles
    tpot_s: Percentiles
    prefill_worker_s: float  # from the decision to start a worker until it is gone
    decode_worker_s: float
    most_prefill: int
    most_decode: int
    num_changes: int

    @property
    def worker_s(self) -> float:
        """Of both pools."""
        return self.prefill_worker_s + self.decode_worker_s

    def to_dict(self) -> dict[str, object]:
        """Plain data."""
        return asdict(self) | {"worker_s": self.worker_s}


def run_fixed(
    spec: ClusterSpec, trace: Trace, objectives: Objectives, *, seed: int
) -> ScalingReport:
    """All workers of the spec, all the time."""
    return _run(spec, trace, None, objectives, seed=seed)


def run_scaled(
    spec: ClusterSpec, trace: Trace, policy: ScalingPolicy, objectives: Objectives, *, seed: int
) -> ScalingReport:
    """Begin with the least of both pools."""
    config = policy.config
    least = {
        name: spec_number if (pool := config.pool(name)) is None else pool.min
        for name, spec_number in ((PREFILL, spec.num_prefill), (DECODE, spec.num_decode))
    }
    start = replace(spec, num_prefill=least[PREFILL], num_decode=least[DECODE])
    return _run(start, trace, policy, objectives, seed=seed)


def serve_policies(config: ScalingConfig) -> Iterator[OngoingRequests]:
    """Serve's default policy with many targets."""
    for prefill in SERVE_PREFILL_TARGETS:
        for decode in SERVE_DECODE_TARGETS:
            yield OngoingRequests(config=config, target={PREFILL: prefill, DECODE: decode})


def cheapest_equal(reports: Iterable[ScalingReport], ours: ScalingReport) -> ScalingReport:
    """The cheapest with our goodput; where none has it, the one that comes closest."""
    reports = list(reports)
    equal = [each for each in reports if each.good_share >= ours.good_share - EQUAL_SHARE]
    if equal:
        return min(equal, key=lambda each: each.worker_s)
    return max(reports, key=lambda each: each.good_share)


def _run(
    spec: ClusterSpec,
    trace: Trace,
    policy: ScalingPolicy | None,
    objectives: Objectives,
    *,
    seed: int,
) -> ScalingReport:
    cluster = SimCluster(spec, "relevo", seed=seed)
    most: Mapping[str, int] = {PREFILL: spec.num_prefill, DECODE: spec.num_decode}
    keeper = None
    if policy is not None:
        scaler = policy.make(cluster)
        keeper = PoolKeeper(cluster, scaler, start_s=spec.hardware.restart_s)
        most = keeper.most
    run = cluster.run(trace)
    cluster.check_integrity()
    report = make_report(run, objectives)
    return ScalingReport(
        policy=FIXED if policy is None else policy.name,
        good_share=report.good_share,
        goodput=report.goodput,
        ttft_s=report.ttft_s,
        tpot_s=report.tpot_s,
        prefill_worker_s=_worker_s(cluster, PREFILL),
        decode_worker_s=_worker_s(cluster, DECODE),
        most_prefill=most[PREFILL],
        most_decode=most[DECODE],
        num_changes=0 if keeper is None else keeper.num_changes,
    )


def _worker_s(cluster: SimCluster, pool: str) -> float:
    now_s = cluster.agenda.now_s
    return sum(
        (now_s if worker.ended_s is None else worker.ended_s) - worker.asked_for_s
        for worker in cluster.workers
        if worker.pool == pool
    )
