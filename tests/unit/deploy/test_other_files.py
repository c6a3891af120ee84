"""Compose, the collector, `ray up`: what they name exists, the configuration is the one file."""

import json
import tomllib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from cluster.config import config_from_args, load_config
from cluster.placement import unplaceable
from cluster.rooms import demands

DEPLOY = Path(__file__).resolve().parents[3] / "deploy"
VERSION = tomllib.loads((DEPLOY.parent / "pyproject.toml").read_text())["project"]["version"]
RAY_UP = DEPLOY / "ray_up"


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


COMPOSE = read(DEPLOY / "compose.yaml")


def test_compose_pins_its_images_and_shows_loopback_only() -> None:
    assert set(COMPOSE["services"]) == {"relevo", "prometheus", "grafana", "collector", "jaeger"}
    for name, service in COMPOSE["services"].items():
        tag = service["image"].partition(":")[2]
        assert tag.strip("v")[0].isdigit(), name
        for port in service.get("ports", ()):
            assert port.startswith("127.0.0.1:"), name
        assert not {"privileged", "env_file"} & set(service)
    assert COMPOSE["services"]["relevo"]["image"] == f"relevo:{VERSION}"


def test_compose_mounts_files_that_exist() -> None:
    for service in COMPOSE["services"].values():
        for volume in service.get("volumes", ()):
            source, _, mode = volume.split(":")
            assert (DEPLOY / source).exists(), source
            assert mode == "ro"
    build = COMPOSE["services"]["relevo"]["build"]
    assert (DEPLOY / build["context"] / build["dockerfile"]).is_file()


def test_what_compose_sets_is_right_and_leads_to_the_collector() -> None:
    command = COMPOSE["services"]["relevo"]["command"]
    assert command[:2] == ["relevo", "serve"]
    config = load_config(assignments=command[3::2], environ={})
    receiver = read(DEPLOY / "otel" / "collector.yaml")["receivers"]["otlp"]
    assert config.telemetry.otlp_endpoint == f"http://{receiver['protocols']['grpc']['endpoint']}"
    # They share one network, in which 127.0.0.1 is the same for all.
    for name in ("prometheus", "grafana", "collector"):
        assert COMPOSE["services"][name]["network_mode"] == "service:relevo"
    scraped = read(DEPLOY / "prometheus" / "prometheus.yaml")["scrape_configs"][0]
    assert scraped["static_configs"][0]["targets"] == [f"127.0.0.1:{config.ingress.http_port}"]


def test_grafana_finds_prometheus_and_the_dashboards() -> None:
    folder = DEPLOY / "grafana" / "provisioning"
    (source,) = read(folder / "datasources.yaml")["datasources"]
    assert source["url"] == "http://127.0.0.1:9090"
    (provider,) = read(folder / "dashboards.yaml")["providers"]
    mounts = [volume.split(":") for volume in COMPOSE["services"]["grafana"]["volumes"]]
    (folder_mounted,) = (src for src, target, _ in mounts if target == provider["options"]["path"])
    assert list((DEPLOY / folder_mounted).glob("relevo-*.json"))


def test_the_collector_s_pipelines_name_what_is_defined() -> None:
    tree = read(DEPLOY / "otel" / "collector.yaml")
    for pipeline in tree["service"]["pipelines"].values():
        for kind in ("receivers", "processors", "exporters"):
            assert set(pipeline[kind]) <= set(tree[kind])
        assert pipeline["processors"][0] == "memory_limiter"
    assert set(tree["service"]["extensions"]) <= set(tree["extensions"])
    names = COMPOSE["services"]["collector"]["environment"]
    assert tree["exporters"]["otlp"]["endpoint"] == f"${{env:{next(iter(names))}}}"


def test_ray_up_is_valid_by_ray_s_own_schema() -> None:
    tree = read(RAY_UP / "cluster.yaml")
    ray = find_spec("ray")
    assert ray is not None
    assert ray.origin is not None
    schema = json.loads((Path(ray.origin).parent / "autoscaler" / "ray-schema.json").read_text())
    jsonschema.validate(tree, schema)
    assert tree["head_node_type"] in tree["available_node_types"]
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(tree | {"max_worker": 1}, schema)


def test_ray_up_s_nodes_hold_every_replica() -> None:
    types = read(RAY_UP / "cluster.yaml")["available_node_types"]
    nodes = [each for each in types.values() for _ in range(each.get("min_workers", 1))]
    config = load_config(RAY_UP / "relevo.yaml", environ={})
    labels = [node["labels"] for node in nodes]
    assert unplaceable(demands(config), [node["resources"] for node in nodes], labels=labels) == []


def test_ray_up_mounts_the_file_that_serve_reads() -> None:
    tree = read(RAY_UP / "cluster.yaml")
    mounts = tree["file_mounts"]
    (application,) = read(RAY_UP / "serve.yaml")["applications"]
    assert mounts[application["args"]["config_file"]] == "deploy/ray_up/relevo.yaml"
    config = config_from_args({"config_file": str(RAY_UP / "relevo.yaml")})
    assert config.cluster.token_file in mounts
    options = dict(
        option.removeprefix("--env=").split("=")
        for option in tree["docker"]["run_options"]
        if option.startswith("--env=")
    )
    assert options["RAY_AUTH_MODE"] == "token"
    assert options["RAY_AUTH_TOKEN_PATH"] in mounts
    (command,) = tree["setup_commands"]
    for file in (config.cluster.token_file, options["RAY_AUTH_TOKEN_PATH"]):
        assert file in command
    assert tree["provider"]["use_internal_ips"] is True
    assert all("dashboard-host=0.0.0.0" not in each for each in tree["head_start_ray_commands"])
