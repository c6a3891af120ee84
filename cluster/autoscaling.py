"""Serve's autoscaling, led by the ingress: which options the deployments get, and their policies.

    ingress: record_autoscaling_stats() ──► Serve's controller: TellWishes ──► scaling_board
                                                                FollowWishes of each pool ◄──┘

Serve ships this module to its controller by value, and what it imports by name: nothing here may
keep state. Delays and bounds are the router's business (`router/scaling/policy.py`), so Serve's own
delays are zero.
"""

from collections.abc import Mapping
from typing import Any

from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy

from cluster import scaling_board
from router.scaling.config import PoolScaling

LOOK_PERIOD_S = 1.0  # Serve asks the ingress, and tells its controller, so often
LOOK_BACK_S = 5.0  # of which the newest value counts
POOLS = ("prefill", "decode")

Decision = tuple[int, dict[str, Any]]


class TellWishes:
    """The ingress's policy: leave its own number alone, pass on what it wishes for the pools."""

    def __call__(self, context: AutoscalingContext) -> Decision:
        """Called in Serve's controller, about ten times a second."""
        assert context.app_name is not None
        metrics: Mapping[str, Mapping[Any, Any]] = context.raw_metrics or {}
        for pool in POOLS:
            floors = metrics.get(f"{pool}_floor", {})
            newest = {
                str(replica): scaling_board.Wish(
                    at_s=series[-1].timestamp,
                    target=int(series[-1].value),
                    is_floor=bool(floors.get(replica) and floors[replica][-1].value),
                )
                for replica, series in metrics.get(pool, {}).items()
                if series
            }
            scaling_board.write(context.app_name, pool, newest)
        return context.target_num_replicas, {}


class FollowWishes:
    """A pool's policy: as many as the ingress wishes for; without a wish as many as there are."""

    def __init__(self, pool: str) -> None:
        self._pool = pool

    def __call__(self, context: AutoscalingContext) -> Decision:
        """Called in Serve's controller, about ten times a second."""
        assert context.app_name is not None
        assert context.current_time is not None
        wished = scaling_board.read(
            context.app_name,
            self._pool,
            present=context.target_num_replicas,
            now_s=context.current_time,
        )
        return wished, {}


def ingress_options(num_replicas: int, *, is_scaling: bool) -> dict[str, Any]:
    """A fixed number of ingresses; with autoscaling, since Serve asks only such a deployment."""
    if not is_scaling:
        return {"num_replicas": num_replicas}
    return _options(least=num_replicas, first=num_replicas, most=num_replicas, policy="TellWishes")


def pool_options(pool: str, num_replicas: int, scaling: PoolScaling | None) -> dict[str, Any]:
    """A fixed number of workers, or between the bounds as the ingress wishes."""
    if scaling is None:
        return {"num_replicas": num_replicas}
    return _options(
        least=scaling.min, first=num_replicas, most=scaling.max, policy="FollowWishes", pool=pool
    )


def _options(*, least: int, first: int, most: int, policy: str, **arguments: str) -> dict[str, Any]:
    config = AutoscalingConfig(
        min_replicas=least,
        initial_replicas=first,
        max_replicas=most,
        upscale_delay_s=0.0,
        downscale_delay_s=0.0,
        metrics_interval_s=LOOK_PERIOD_S,
        look_back_period_s=LOOK_BACK_S,
        policy=AutoscalingPolicy(  # type: ignore[no-untyped-call]
            policy_function=f"cluster.autoscaling:{policy}", policy_kwargs=arguments
        ),
    )
    return {"autoscaling_config": config}
