"""What each room gets of the whole configuration."""

from pathlib import Path

import pytest

import cluster
from cluster import rooms
from cluster.config import ClusterConfig, load_config
from cluster.config_sources import ConfigError


def load(*assignments: str) -> ClusterConfig:
    return load_config(assignments=("cluster.token_file=/t", *assignments), environ={})


def test_our_package_is_the_one_that_is_imported() -> None:
    # The index has unrelated packages of the same names.
    assert Path(cluster.__file__).parent == Path(__file__).resolve().parents[3] / "cluster"


def test_a_pool_may_override_the_engine() -> None:
    config = load("engine.block_size=16", "decode.engine.block_size=64", "engine.max_num_seqs=4")
    prefill = rooms.worker_config(config, config.prefill, num_threads=1).engine
    decode = rooms.worker_config(config, config.decode, num_threads=1).engine
    assert (prefill.block_size, decode.block_size) == (16, 64)
    assert prefill.max_num_seqs == decode.max_num_seqs == 4


def test_threads_that_were_set_are_kept() -> None:
    config = load("prefill.engine.num_threads=3")
    assert rooms.worker_config(config, config.prefill, num_threads=1).engine.num_threads == 3
    assert rooms.worker_config(config, config.decode, num_threads=1).engine.num_threads == 1


@pytest.mark.parametrize(
    ("prefill", "decode", "node_cpus", "expected"),
    [
        (1, 1, [2.0], 1),
        (1, 1, [8.0], 4),
        (2, 2, [2.0], 1),
        (0, 1, [2.0], 2),
        (1, 1, [16.0, 8.0], 8),
        (1, 1, [], 1),
    ],
)
def test_an_engine_gets_its_share_of_the_cores(
    prefill: int, decode: int, node_cpus: list[float], expected: int
) -> None:
    config = load(f"prefill.replicas={prefill}", f"decode.replicas={decode}")
    assert rooms.threads_per_engine(config, node_cpus=node_cpus) == expected


def test_a_pool_with_gpus_runs_on_them() -> None:
    config = load("decode.num_gpus=1")
    assert rooms.worker_config(config, config.decode, num_threads=1).engine.device == "cuda"
    assert rooms.worker_config(config, config.prefill, num_threads=1).engine.device == "cpu"


def test_the_model_is_named_after_its_directory_or_its_hub_id(tmp_path: Path) -> None:
    assert load(f"model.path={tmp_path}/").model.name == tmp_path.name
    assert load("model.path=org/name").model.name == "org/name"
    assert load("model.path=org/name", "model.id=mine").model.name == "mine"


def test_a_relative_path_means_the_same_in_every_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    config = rooms.with_absolute_paths(load("model.path=model"))
    assert config.model.path == str(tmp_path / "model")
    assert config.model.name == "model"


def test_numbers_that_do_not_fit_together_are_refused() -> None:
    with pytest.raises(ConfigError, match="max_num_batched_tokens"):
        rooms.check(load("engine.max_num_batched_tokens=8", "decode.engine.max_num_seqs=9"))


def test_two_workers_of_each_pool_and_an_ingress_fit_two_cores() -> None:
    demands = rooms.demands(load("prefill.replicas=2", "decode.replicas=2"))
    assert [demand.name for demand in demands] == [
        "ingress-0",
        "prefill-0",
        "prefill-1",
        "decode-0",
        "decode-1",
    ]
    assert sum(demand.num_cpus for demand in demands) <= 2.0
