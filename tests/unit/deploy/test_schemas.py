"""Manifests against schemas: Kubernetes' own from a package; KubeRay's, which none ships, as names.

Not validated: KubeRay's CRD itself, and what a cluster's admission would say.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
from jsonschema import Draft202012Validator, ValidationError
from referencing import Registry, Resource
from referencing.jsonschema import DRAFT202012

from tests.unit.deploy.manifests import OVERLAYS, Rendered, rendered

SCHEMAS = Path(kubernetes_validate.__file__).parent / "kubernetes-json-schema"
VERSIONS = ("1.31", "1.37")  # the oldest with all that is used, and the newest the package knows
# Of ray.io/v1 in KubeRay 1.7; growing a list is a visible act.
RAY_SERVICE = {
    *("serveConfigV2", "rayClusterConfig", "upgradeStrategy", "rayClusterDeletionDelaySeconds"),
    *("serveService", "excludeHeadPodFromServeSvc", "managedBy", "suspend"),
}
RAY_CLUSTER = {
    *("rayVersion", "enableInTreeAutoscaling", "autoscalerOptions", "headGroupSpec"),
    *("workerGroupSpecs", "gcsFaultToleranceOptions", "authOptions", "networkPolicy"),
    *("tlsOptions", "upgradeStrategy", "historyServerOptions", "suspend", "managedBy"),
}
GROUP = {"rayStartParams", "template", "resources", "labels"}
HEAD_GROUP = GROUP | {"headService", "serviceType", "enableIngress"}
WORKER_GROUP = GROUP | {
    *("groupName", "replicas", "minReplicas", "maxReplicas", "numOfHosts"),
    *("idleTimeoutSeconds", "priority", "suspend", "scaleStrategy"),
}
AUTOSCALER = {
    *("version", "idleTimeoutSeconds", "upscalingMode", "resources", "image", "imagePullPolicy"),
    *("securityContext", "env", "envFrom", "volumeMounts"),
}
UPGRADE_TYPES = {"NewCluster", "NewClusterWithIncrementalUpgrade", "None"}
STEPS = {"maxSurgePercent", "stepSizePercent", "intervalSeconds", "gatewayClassName"}


@cache
def definitions(version: str) -> Registry[Any]:
    """What the schemas of one version of Kubernetes refer to; reading it is most of the work."""
    folder = SCHEMAS / f"v{version}.0-local-strict"
    contents = json.loads((folder / "_definitions.json").read_text())
    return Resource.from_contents(contents, default_specification=DRAFT202012) @ Registry()


def validate(tree: dict[str, Any]) -> None:
    for version in VERSIONS:
        group, _, api = tree["apiVersion"].rpartition("/")
        name = "-".join([tree["kind"].lower(), *filter(None, [group.partition(".")[0]]), api])
        schema = json.loads((SCHEMAS / f"v{version}.0-local-strict" / f"{name}.json").read_text())
        Draft202012Validator(schema, registry=definitions(version)).validate(tree)


def check_ray_service(every: Rendered) -> None:
    spec, cluster = every.service, every.cluster
    assert set(spec) <= RAY_SERVICE
    assert set(cluster) <= RAY_CLUSTER
    assert set(cluster["headGroupSpec"]) <= HEAD_GROUP
    assert set(cluster["autoscalerOptions"]) <= AUTOSCALER
    assert set(cluster["authOptions"]) <= {"mode", "secretName", "enableK8sTokenAuth"}
    assert spec["upgradeStrategy"]["type"] in UPGRADE_TYPES
    assert set(spec["upgradeStrategy"].get("clusterUpgradeOptions", ())) <= STEPS
    for group in cluster["workerGroupSpecs"]:
        assert set(group) <= WORKER_GROUP
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
    for pods in every.groups:
        assert all(isinstance(value, str) for value in pods.ray_params.values())
        meta = {"name": "any"}
        validate(
            {"apiVersion": "v1", "kind": "PodTemplate", "metadata": meta, "template": pods.template}
        )


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_object_is_valid(overlay: str) -> None:
    every = rendered(overlay)
    kinds = {each["kind"] for each in every.objects}
    assert kinds == {"ConfigMap", "NetworkPolicy", "PodDisruptionBudget", "RayService", "Service"}
    for each in every.objects:
        assert each["metadata"]["namespace"] == "relevo"
        if each["kind"] != "RayService":
            validate(each)
    check_ray_service(every)


def test_the_validator_finds_a_misspelt_key() -> None:
    service = rendered(OVERLAYS[0]).of_kind("Service")[0]
    broken = service | {"spec": service["spec"] | {"picks": {}}}
    with pytest.raises(ValidationError, match="picks"):
        validate(broken)
