"""What every pod of every overlay must be: probes, drains, rights, secrets, images, spread."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.config import ClusterConfig, config_from_args, load_config
from cluster.placement import unplaceable
from cluster.rooms import check, demands
from tests.unit.deploy.manifests import DEPLOY, KUBERNETES, OVERLAYS, leaves, rendered

MIN_MODEL_LOAD_S = 120  # what a probe that could end a pod would have to grant a model
RAY_END_S = 10

pytestmark = pytest.mark.parametrize("overlay", OVERLAYS)


def path_of(probe: dict[str, Any]) -> str:
    return str(probe["httpGet"]["path"] if "httpGet" in probe else probe["grpc"])


def config_of(overlay: str) -> ClusterConfig:
    config = load_config(KUBERNETES / "overlays" / overlay / "relevo.yaml", environ={})
    check(config)
    return config


def test_the_config_map_is_the_file_that_serve_takes(overlay: str, tmp_path: Path) -> None:
    file = KUBERNETES / "overlays" / overlay / "relevo.yaml"
    (config_map,) = rendered(overlay).of_kind("ConfigMap")
    assert config_map["data"] == {"relevo.yaml": file.read_text()}
    tree = yaml.safe_load(rendered(overlay).service["serveConfigV2"])
    (application,) = tree["applications"]
    assert tree["proxy_location"] == "Disabled"
    assert application["import_path"] == "cluster.app:build_app"
    mounted = application["args"].pop("config_file")
    assert application["args"] == {}
    for group in rendered(overlay).groups:
        (mount,) = (each for each in group.container["volumeMounts"] if each["name"] == "config")
        assert (mount["mountPath"], mount["subPath"]) == (mounted, "relevo.yaml")
        (volume,) = (each for each in group.spec["volumes"] if each["name"] == "config")
        assert volume["configMap"]["name"] == config_map["metadata"]["name"]
    assert config_map["metadata"]["name"] != "relevo-config", "no hash: no upgrade on a change"
    assert config_from_args({"config_file": str(file)}) == config_of(overlay)


def test_every_replica_finds_a_pod(overlay: str) -> None:
    groups = rendered(overlay).workers
    pods = [group for group in groups for _ in range(group.num_pods)]
    resources = [
        {key.upper(): float(group.ray_params.get(f"num-{key}s", 0)) for key in ("cpu", "gpu")}
        for group in pods
    ]
    labels = [group.ray_labels for group in pods]
    assert unplaceable(demands(config_of(overlay)), resources, labels=labels) == []
    assert rendered(overlay).head.ray_params["num-cpus"] == "0"


def test_pods_have_the_gpus_that_ray_is_told_of(overlay: str) -> None:
    config = config_of(overlay)
    for group in rendered(overlay).groups:
        resources = group.container["resources"]
        num_gpus = int(group.ray_params.get("num-gpus", 0))
        assert resources["limits"].get("nvidia.com/gpu", 0) == num_gpus
        assert resources["requests"].get("nvidia.com/gpu", 0) == num_gpus
        assert float(group.ray_params["num-cpus"]) <= float(resources["limits"]["cpu"])
        keys = {toleration["key"] for toleration in group.spec.get("tolerations", ())}
        assert ("nvidia.com/gpu" in keys) == (num_gpus > 0)
    wanted = sum(pool.replicas * pool.num_gpus for pool in (config.prefill, config.decode))
    given = sum(
        group.num_pods * int(group.ray_params.get("num-gpus", 0))
        for group in rendered(overlay).groups
    )
    assert given == wanted


def test_pools_that_grow_find_pods(overlay: str) -> None:
    config = config_of(overlay)
    for role, pool in (("prefill", config.prefill), ("decode", config.decode)):
        if pool.autoscaling is None:
            continue
        (spec,) = (
            each
            for each in rendered(overlay).cluster["workerGroupSpecs"]
            if each["labels"] == {"role": role}
        )
        assert rendered(overlay).cluster["enableInTreeAutoscaling"]
        # One worker a pod, as both take all its GPUs.
        assert pool.num_gpus == int(spec["rayStartParams"]["num-gpus"])
        assert spec["minReplicas"] <= pool.autoscaling.min
        assert spec["maxReplicas"] >= pool.autoscaling.max


def test_who_is_ready_is_not_asked_as_who_lives(overlay: str) -> None:
    for group in rendered(overlay).groups:
        container = group.container
        ready, alive, started = (
            container[name] for name in ("readinessProbe", "livenessProbe", "startupProbe")
        )
        assert path_of(ready) != path_of(alive)
        # Probes that end a pod ask Ray, never the model: however long it loads, nothing ends.
        for probe in (alive, started):
            assert path_of(probe) == "/api/healthz"
            assert str(probe["httpGet"]["port"]) == group.ray_params["dashboard-agent-listen-port"]
        assert started["periodSeconds"] * started["failureThreshold"] >= MIN_MODEL_LOAD_S


def test_an_ingress_is_ready_when_it_serves_and_workers_when_they_take_requests(
    overlay: str,
) -> None:
    config = config_of(overlay)
    low, _, _ = config.rpc.port_range.partition("-")
    for group in rendered(overlay).workers:
        probe = group.container["readinessProbe"]
        if "relevo/ingress" in group.labels:
            assert probe["httpGet"] == {"path": "/ready", "port": config.ingress.http_port}
        else:
            assert probe["grpc"] == {"port": int(low)}


def test_a_pod_may_drain_before_it_is_killed(overlay: str) -> None:
    config = config_of(overlay)
    drain_s = max(config.prefill.drain_s, config.decode.drain_s)
    for group in rendered(overlay).workers:
        command, within_s = group.container["lifecycle"]["preStop"]["exec"]["command"]
        assert command == "relevo-prestop"
        assert int(within_s) > drain_s + RAY_END_S
        grace_s = group.spec["terminationGracePeriodSeconds"]
        assert grace_s > int(within_s) + drain_s + RAY_END_S
        assert rendered(overlay).service["rayClusterDeletionDelaySeconds"] >= grace_s


def test_each_group_has_a_budget_that_blocks_nobody(overlay: str) -> None:
    budgets = [each["spec"] for each in rendered(overlay).of_kind("PodDisruptionBudget")]
    assert len(budgets) == len(rendered(overlay).workers)
    for group in rendered(overlay).workers:
        (budget,) = (each for each in budgets if group.is_selected(each["selector"]))
        assert "maxUnavailable" not in budget, "Kubernetes cannot count it for a RayCluster's pods"
        assert budget["minAvailable"] == group.num_pods - 1


def test_the_head_is_not_moved_to_save_a_node(overlay: str) -> None:
    annotations = rendered(overlay).head.template["metadata"]["annotations"]
    assert annotations == {"cluster-autoscaler.kubernetes.io/safe-to-evict": "false"}


def test_the_pods_of_a_group_spread_over_nodes(overlay: str) -> None:
    for group in rendered(overlay).workers:
        (spread,) = group.spec["topologySpreadConstraints"]
        assert spread["topologyKey"] == "kubernetes.io/hostname"
        assert group.is_selected(spread["labelSelector"])
        others = [each for each in rendered(overlay).groups if each.name != group.name]
        assert not any(each.is_selected(spread["labelSelector"]) for each in others)


def test_nothing_runs_as_root_or_could_become_it(overlay: str) -> None:
    asks_the_api = rendered(overlay).cluster["enableInTreeAutoscaling"]
    for group in rendered(overlay).groups:
        person = group.spec["securityContext"]
        assert person["runAsNonRoot"] is True
        assert person["runAsUser"] == person["fsGroup"] == 1000
        assert person["seccompProfile"] == {"type": "RuntimeDefault"}
        assert group.container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        # The head's autoscaler alone has something to ask of Kubernetes.
        has_account = group.spec["automountServiceAccountToken"]
        assert has_account == (group.name == "head" and asks_the_api)
        forbidden = {"hostNetwork", "hostPID", "hostIPC", "hostPath", "privileged", "hostPort"}
        assert not forbidden & {key for key, _ in leaves(group.template)}
        # What Ray and we write to lies on volumes.
        mounts = {each["mountPath"] for each in group.container["volumeMounts"]}
        assert {"/tmp", "/home/relevo", "/dev/shm"} <= mounts


def test_ray_asks_for_a_token(overlay: str) -> None:
    assert rendered(overlay).cluster["authOptions"] == {"mode": "token"}


def test_secrets_come_as_files_and_from_elsewhere(overlay: str) -> None:
    config = config_of(overlay)
    assert rendered(overlay).of_kind("Secret") == []
    for group in rendered(overlay).groups:
        assert "env" not in group.container
        assert "envFrom" not in group.container
        (volume,) = (each for each in group.spec["volumes"] if each["name"] == "secrets")
        assert volume["secret"] == {"secretName": "relevo", "defaultMode": 0o440}
        (mount,) = (each for each in group.container["volumeMounts"] if each["name"] == "secrets")
        for file in (config.cluster.token_file, config.ingress.api_keys_file):
            assert not file or Path(file).parent == Path(mount["mountPath"])
    assert config.cluster.token_file


def test_every_pod_runs_this_version(overlay: str) -> None:
    version = tomllib.loads((DEPLOY.parent / "pyproject.toml").read_text())["project"]["version"]
    for group in rendered(overlay).groups:
        assert group.images == [f"relevo:{version}"]


def test_ray_s_versions_agree(overlay: str) -> None:
    lock = (DEPLOY / "runtime.lock").read_text()
    (version,) = re.findall(r"^ray==(\S+)", lock, re.MULTILINE)
    assert rendered(overlay).cluster["rayVersion"] == version
