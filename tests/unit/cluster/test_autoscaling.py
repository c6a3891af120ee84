"""What Serve is told of pools that grow and shrink, and how its policies pass wishes on."""

import pytest
from ray.serve._private.common import DeploymentID, ReplicaID, TimeStampedValue
from ray.serve.autoscaling_policy import _apply_autoscaling_config
from ray.serve.config import AutoscalingConfig, AutoscalingContext

from cluster import scaling_board
from cluster.autoscaling import FollowWishes, TellWishes, ingress_options, pool_options
from router.scaling.config import DecodeScaling

APP = "relevo"
INGRESSES = [ReplicaID(unique_id=name, deployment_id=DeploymentID(name="Ingress")) for name in "ab"]


@pytest.fixture(autouse=True)
def empty_board(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling_board, "_wishes", {})


def context(
    *,
    now_s: float = 100.0,
    target: int = 2,
    running: int = 2,
    wishes: dict[str, list[tuple[float, float]]] | None = None,  # of each ingress
    config: AutoscalingConfig | None = None,
) -> AutoscalingContext:
    raw = {
        pool: {
            INGRESSES[number]: [TimeStampedValue(at_s, value)]
            for number, (at_s, value) in enumerate(values)
        }
        for pool, values in (wishes or {}).items()
    }
    return AutoscalingContext(
        deployment_id=DeploymentID(name="X", app_name=APP),
        deployment_name="X",
        app_name=APP,
        current_num_replicas=running,
        target_num_replicas=target,
        running_replicas=[],
        total_num_requests=0.0,
        total_queued_requests=0.0,
        aggregated_metrics={},
        raw_metrics=raw,
        capacity_adjusted_min_replicas=1,
        capacity_adjusted_max_replicas=8,
        policy_state={},
        last_scale_up_time=None,
        last_scale_down_time=None,
        current_time=now_s,
        config=config,
    )


def test_a_pool_follows_the_ingress() -> None:
    tell, follow = TellWishes(), FollowWishes("decode")
    told = context(target=1, wishes={"decode": [(99.0, 5.0)], "prefill": [(99.0, 3.0)]})
    assert tell(told)[0] == 1, "the ingress itself stays as it is"
    assert follow(context())[0] == 5
    assert FollowWishes("prefill")(context())[0] == 3


def test_of_two_ingresses_the_greater_wish_counts() -> None:
    TellWishes()(context(wishes={"decode": [(99.0, 2.0), (98.0, 4.0)]}))
    assert FollowWishes("decode")(context())[0] == 4


@pytest.mark.parametrize("wishes", [{}, {"decode": [(80.0, 7.0)]}])
def test_without_a_fresh_wish_a_pool_stays_as_it_is(
    wishes: dict[str, list[tuple[float, float]]],
) -> None:
    TellWishes()(context(wishes=wishes))
    assert FollowWishes("decode")(context(target=3))[0] == 3


def test_an_ingress_that_does_not_know_all_workers_yet_lets_nobody_go() -> None:
    TellWishes()(context(wishes={"decode": [(99.0, 1.0)], "decode_floor": [(99.0, 1.0)]}))
    assert FollowWishes("decode")(context(target=4))[0] == 4
    TellWishes()(context(wishes={"decode": [(99.0, 6.0)], "decode_floor": [(99.0, 1.0)]}))
    assert FollowWishes("decode")(context(target=4))[0] == 6
    TellWishes()(context(wishes={"decode": [(99.0, 1.0)], "decode_floor": [(99.0, 0.0)]}))
    assert FollowWishes("decode")(context(target=4))[0] == 1


def test_an_ingress_that_fell_silent_is_forgotten() -> None:
    TellWishes()(context(wishes={"decode": [(99.0, 7.0)]}))
    TellWishes()(context(wishes={}))
    assert FollowWishes("decode")(context(target=3))[0] == 3


def test_serve_adds_no_delay_and_no_factor_of_its_own() -> None:
    scaling = DecodeScaling(min=1, max=6)
    config = pool_options("decode", 2, scaling)["autoscaling_config"]
    policy = config.policy.get_policy()
    wrapped = _apply_autoscaling_config(policy(**config.policy.policy_kwargs))
    for wished in (6, 1):
        # As in Serve's controller: the policy came by value, the board by name.
        scaling_board.write(APP, "decode", {"a": scaling_board.Wish(99.0, wished)})
        assert wrapped(context(config=config))[0] == wished


def test_a_pool_has_its_bounds_and_the_policy_that_follows_for_it() -> None:
    config = pool_options("decode", 2, DecodeScaling(min=1, max=6))["autoscaling_config"]
    assert (config.min_replicas, config.initial_replicas, config.max_replicas) == (1, 2, 6)
    assert config.policy.policy_kwargs == {"pool": "decode"}
    assert config.policy.get_policy().__name__ == "FollowWishes"


def test_without_bounds_a_pool_has_a_number() -> None:
    assert pool_options("prefill", 3, None) == {"num_replicas": 3}
    assert ingress_options(2, is_scaling=False) == {"num_replicas": 2}


def test_the_number_of_ingresses_stays_where_serve_must_ask_them() -> None:
    config = ingress_options(2, is_scaling=True)["autoscaling_config"]
    assert (config.min_replicas, config.initial_replicas, config.max_replicas) == (2, 2, 2)
