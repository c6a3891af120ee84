"""The whole configuration: its fields, where values come from, what is refused."""

from pathlib import Path

import pytest
import yaml

from cluster.config import ClusterConfig, config_from_args, load_config, non_defaults
from cluster.config_sources import ConfigError, dotted_keys

ENGINE_KEYS = {
    "block_size": 32,
    "num_kv_blocks": None,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 512,
    "num_threads": None,
    "pin_threads": True,
    "cuda_graphs": True,
    "run_ahead": True,
}
POOL = {"replicas": 1, "num_gpus": 0.0, "num_cpus": 0.4, "drain_s": 30.0, "node_labels": {}}
POOL_KEYS = POOL | {f"engine.{key}": None for key in ENGINE_KEYS}
SCALING = {"min": 1, "max": 1, "up_delay_s": 5.0, "down_delay_s": 120.0}
PREFILL_SCALING = SCALING | {"ttft_s": 2.0, "busy_share": 0.7}
DECODE_SCALING = SCALING | {"itl_s": 0.05, "kv_share": 0.8, "seqs_share": 0.9}


def scaled(keys: dict[str, object]) -> dict[str, object]:
    return {"autoscaling": None} | {f"autoscaling.{key}": value for key, value in keys.items()}


# Growing this table is a visible act.
FIELDS = {
    "model": {"id": "", "path": ".models/smollm2-135m-instruct", "dtype": "auto"}
    | {"max_model_len": None},
    "engine": ENGINE_KEYS,
    "prefill": POOL_KEYS | scaled(PREFILL_SCALING),
    "decode": POOL_KEYS | scaled(DECODE_SCALING),
    "router": {
        "local_prefill": "auto",
        "max_waiting_requests": None,
        "request_timeout_s": 600.0,
        "migration_limit": 3,
    },
    "kv_transfer": {
        "backend": "auto",
        "transfer_timeout_s": 5.0,
        "lease_s": 10.0,
        "max_links": 16,
        "reach": "any",
        "digest_sample": 0.01,
        "interface": "",
        "port_range": "",
    },
    "rpc": {
        "port_range": "",
        "tls": None,
        "tls.certificate_file": None,
        "tls.private_key_file": None,
        "tls.ca_file": None,
        "tls.server_name": "relevo-worker",
    },
    "cluster": {"ray_address": "local", "bind_host": "127.0.0.1", "token_file": ""},
    "ingress": {
        "http_port": 8000,
        "grpc_port": 9000,
        "replicas": 1,
        "max_per_node": 1,
        "node_labels": {},
        "tls": None,
        "tls.certificate_file": None,
        "tls.private_key_file": None,
        "tls.client_ca_file": "",
        "api_keys_file": "",
        "tenant_cache_salt": False,
        "reflection": None,
        "channelz": False,
        "strict": False,
    },
    "telemetry": {
        "otlp_endpoint": "",
        "sample_ratio": 1.0,
        "slow_first_token_s": 3.0,
        "keep_traces": 256,
        "capture_content": False,
        "request_log_file": "",
    },
}


def load(*assignments: str, file: Path | None = None, **environ: str) -> ClusterConfig:
    return load_config(file, assignments=assignments, environ=environ)


def test_the_fields_and_their_defaults_are_these() -> None:
    expected = {
        f"{section}.{key}": value for section, keys in FIELDS.items() for key, value in keys.items()
    }
    found = dict(dotted_keys(ClusterConfig))
    found["model.path"] = "/".join(Path(found["model.path"]).parts[-2:])
    assert found == expected


def test_a_file_wins_over_the_default(tmp_path: Path) -> None:
    file = tmp_path / "relevo.yaml"
    file.write_text("decode: {replicas: 3, engine: {block_size: 16}}\n")
    config = load(file=file)
    assert (config.decode.replicas, config.decode.engine.block_size) == (3, 16)
    assert config.prefill.replicas == 1


def test_the_environment_wins_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "relevo.yaml"
    file.write_text("decode: {replicas: 3, num_cpus: 0.1}\n")
    config = load(file=file, RELEVO__DECODE__REPLICAS="4")
    assert (config.decode.replicas, config.decode.num_cpus) == (4, 0.1)


def test_the_command_line_wins_over_the_environment() -> None:
    assert load("decode.replicas=5", RELEVO__DECODE__REPLICAS="4").decode.replicas == 5


def test_the_last_assignment_wins() -> None:
    assert load("decode.replicas=5", "decode.replicas=6").decode.replicas == 6


def test_other_variables_are_not_ours() -> None:
    assert load(RELEVO_TESTING="1", RELEVO="x", PATH="/bin") == ClusterConfig()


def test_null_gives_a_computed_value_back(tmp_path: Path) -> None:
    file = tmp_path / "relevo.yaml"
    file.write_text("engine: {num_kv_blocks: 10}\n")
    assert load("engine.num_kv_blocks=null", file=file).engine.num_kv_blocks is None


def test_a_number_may_name_a_model() -> None:
    assert load('model={"id": 7}').model.id == "7"


@pytest.mark.parametrize(
    ("assignment", "nearest"),
    [
        ("decode.replcas=2", "decode.replicas"),
        ("decod.replicas=2", "decode.replicas"),
        ("decode.engine.blocksize=2", "decode.engine.block_size"),
        ("router.timeout=2", "router.request_timeout_s"),
        ("rpc.tls.ca=x", "rpc.tls.ca_file"),
    ],
)
def test_an_unknown_key_names_the_nearest_one(assignment: str, nearest: str) -> None:
    key = assignment.partition("=")[0]
    with pytest.raises(ConfigError, match=f"unknown config key '{key}' in --set.*'{nearest}'"):
        load(assignment)


def test_an_unknown_key_says_where_it_stands(tmp_path: Path) -> None:
    file = tmp_path / "relevo.yaml"
    file.write_text("engine: {block_sise: 16}\n")
    with pytest.raises(ConfigError, match=f"{file}.*did you mean 'engine.block_size'"):
        load(file=file)
    with pytest.raises(ConfigError, match="the environment"):
        load(RELEVO__ENGINE__BLOCK_SISE="16")


def test_a_key_like_nothing_lists_the_sections() -> None:
    with pytest.raises(ConfigError, match="the sections are cluster, decode"):
        load("zzz=1")


@pytest.mark.parametrize(
    ("assignments", "message"),
    [
        (["decode.replicas=two"], "decode.replicas: .*integer.*'two'"),
        (["decode.replicas=0"], "decode: replicas is 0, but without a decode worker nothing"),
        (["decode=2"], "decode: "),
        (["decode"], "expected key.path=value"),
        (["engine={"], "JSON"),
        (["router.local_prefill=maybe"], "router: .*'maybe'.*fallback"),
        (["prefill.replicas=0", "router.local_prefill=never"], "needs prefill workers"),
        (["ingress.http_port=9000"], "both 9000"),
        (["ingress.http_port=0"], "ingress.http_port"),
        (["rpc.tls.ca_file=x"], "rpc.tls.certificate_file: Field required"),
        (["model.path=x", "model.path.y=1"], "has a value already"),
        (["prefill.drain_s=inf"], "prefill.drain_s: got inf but expected a finite number"),
        (["kv_transfer.lease_s=nan"], "kv_transfer.lease_s: got nan"),
        (["decode.autoscaling.up_delay_s=nan"], "decode.autoscaling.up_delay_s: got nan"),
    ],
)
def test_a_wrong_value_is_one_clear_line(assignments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load(*assignments)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["- a list\n", "decode: [\n", "just text\n"])
def test_a_file_that_is_no_table_of_keys_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "relevo.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"relevo\.yaml"):
        load(file=file)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the config file"):
        load(file=tmp_path / "none.yaml")


def test_what_config_show_prints_is_the_same_configuration(tmp_path: Path) -> None:
    config = load("decode.replicas=2", "decode.engine.block_size=16", "ingress.reflection=off")
    tree = config.model_dump(mode="json")
    assert config_from_args(tree) == config
    file = tmp_path / "shown.yaml"
    file.write_text(yaml.safe_dump(tree))
    assert load(file=file) == config


def test_args_of_a_serve_file_are_checked_like_a_file() -> None:
    with pytest.raises(ConfigError, match=r"unknown config key 'decode\.x' in args"):
        config_from_args({"decode": {"x": 1}})


def test_args_may_name_a_file_and_win_over_it(tmp_path: Path) -> None:
    file = tmp_path / "relevo.yaml"
    file.write_text("decode: {replicas: 3, num_cpus: 1}\n")
    config = config_from_args({"config_file": str(file), "decode": {"replicas": 4}})
    assert (config.decode.replicas, config.decode.num_cpus) == (4, 1)
    file.write_text("decode: {replcas: 3}\n")
    with pytest.raises(ConfigError, match=r"decode\.replcas.*relevo\.yaml.*decode\.replicas"):
        config_from_args({"config_file": str(file)})
    with pytest.raises(ConfigError, match="cannot read the config file"):
        config_from_args({"config_file": str(tmp_path / "absent")})


def test_labels_are_a_table_of_free_names(tmp_path: Path) -> None:
    file = tmp_path / "relevo.yaml"
    file.write_text("prefill: {node_labels: {role: prefill, zone: a}}\n")
    config = load("prefill.node_labels.zone=b", file=file)
    assert config.prefill.node_labels == {"role": "prefill", "zone": "b"}
    for value in ("!prefill", "in(a,b)", "", "a" * 300):
        with pytest.raises(ConfigError, match=r"decode\.node_labels\.role"):
            load(f"decode.node_labels.role={value}")


def test_what_a_person_set_is_told_as_they_would_write_it() -> None:
    assert non_defaults(ClusterConfig()) == ""
    config = load_config(
        assignments=["decode.replicas=2", "decode.engine.max_num_seqs=4", "model.dtype=float32"],
        environ={},
    )
    told = "model.dtype=float32 decode.replicas=2 decode.engine.max_num_seqs=4"
    assert non_defaults(config) == told


def test_a_pool_grows_and_shrinks_only_when_told_its_bounds() -> None:
    assert not load().scaling.is_on
    config = load("decode.autoscaling.max=4", "decode.autoscaling.itl_s=0.1")
    assert config.scaling.decode is not None
    assert (config.scaling.decode.min, config.scaling.decode.max) == (1, 4)
    assert config.scaling.decode.itl_s == 0.1
    assert config.scaling.prefill is None
    assert (config.prefill.most_replicas, config.decode.most_replicas) == (1, 4)


@pytest.mark.parametrize(
    ("assignments", "message"),
    [
        (("decode.autoscaling.max=2", "decode.replicas=3"), "replicas is 3, the number to start"),
        (
            ("decode.autoscaling.max=2", "decode.autoscaling.min=3"),
            "Got max = 2 but expected at least min = 3",
        ),
        (("prefill.autoscaling.max=2", "prefill.replicas=0"), "replicas is 0"),
        (("prefill.autoscaling.min=0",), "Got min = 0 but expected at least 1: a start takes"),
        (("decode.autoscaling.max=0",), "Got max = 0"),
        (("prefill.autoscaling.ttft_s=0",), "Got ttft_s = 0"),
        (("prefill.autoscaling.busy_share=2",), "Got busy_share = 2"),
        (("decode.autoscaling.itl_s=-1",), "Got itl_s = -1"),
        (("decode.autoscaling.kv_share=0",), "Got kv_share = 0"),
        (("decode.autoscaling.down_delay_s=-1",), "at least 0"),
        (("decode.autoscaling.ttft_s=1",), "unknown config key 'decode.autoscaling.ttft_s'"),
    ],
)
def test_bounds_and_objectives_that_cannot_be_are_refused(
    assignments: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load(*assignments)
