"""The Kubernetes manifests, as Kustomize renders them."""

import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from tests.programs import require_program

DEPLOY = Path(__file__).resolve().parents[3] / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
OVERLAYS = sorted(path.name for path in (KUBERNETES / "overlays").iterdir())


def leaves(tree: Any) -> Iterator[tuple[str, Any]]:
    """Every key with its value, at any depth."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield key, value
            yield from leaves(value)
    elif isinstance(tree, list):
        for value in tree:
            yield from leaves(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Pods of one kind: the head, or a worker group."""

    name: str
    num_pods: int
    ray_params: dict[str, str]
    ray_labels: dict[str, str]
    template: dict[str, Any]

    @property
    def spec(self) -> dict[str, Any]:
        found: dict[str, Any] = self.template["spec"]
        return found

    @property
    def container(self) -> dict[str, Any]:
        (found,) = self.spec["containers"]
        return dict(found)

    @property
    def labels(self) -> dict[str, str]:
        found: dict[str, str] = self.template["metadata"]["labels"]
        return found

    @property
    def images(self) -> list[str]:
        return [str(value) for key, value in leaves(self.template) if key == "image"]

    def is_selected(self, selector: dict[str, Any]) -> bool:
        """Whether a label selector takes these pods."""
        assert set(selector) <= {"matchLabels"}
        return bool(selector.get("matchLabels", {}).items() <= self.labels.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendered:
    """All objects of one overlay."""

    objects: list[dict[str, Any]] = field(default_factory=list)

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        return [each for each in self.objects if each["kind"] == kind]

    @property
    def service(self) -> dict[str, Any]:
        (found,) = self.of_kind("RayService")
        spec: dict[str, Any] = found["spec"]
        return spec

    @property
    def cluster(self) -> dict[str, Any]:
        found: dict[str, Any] = self.service["rayClusterConfig"]
        return found

    @property
    def config(self) -> dict[str, Any]:
        """The relevo.yaml in its ConfigMap."""
        (found,) = self.of_kind("ConfigMap")
        tree: dict[str, Any] = yaml.safe_load(found["data"]["relevo.yaml"])
        return tree

    @property
    def workers(self) -> list[Group]:
        return [
            Group(
                name=spec["groupName"],
                num_pods=spec["replicas"],
                ray_params=spec["rayStartParams"],
                ray_labels=spec["labels"],
                template=spec["template"],
            )
            for spec in self.cluster["workerGroupSpecs"]
        ]

    @property
    def head(self) -> Group:
        spec = self.cluster["headGroupSpec"]
        return Group(
            name="head",
            num_pods=1,
            ray_params=spec["rayStartParams"],
            ray_labels={},
            template=spec["template"],
        )

    @property
    def groups(self) -> list[Group]:
        return [self.head, *self.workers]

    def policies(self) -> Iterator[dict[str, Any]]:
        yield from (each["spec"] for each in self.of_kind("NetworkPolicy"))


@cache
def rendered(overlay: str) -> Rendered:
    """The overlay as `kubectl apply -k` would send it."""
    return render(KUBERNETES / "overlays" / overlay)


def render(folder: Path) -> Rendered:
    """What Kustomize makes of a folder."""
    kubectl = require_program("kubectl", package="kubernetes-client")
    done = subprocess.run(
        [kubectl, "kustomize", str(folder)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return Rendered(objects=list(yaml.load_all(done.stdout, Loader=yaml.CSafeLoader)))


def render_with(folder: Path, overlay: str, **changes: Any) -> Rendered:
    """The overlay with other keys in its kustomization.yaml, made in an empty folder."""
    shutil.copytree(KUBERNETES, folder)
    file = folder / "overlays" / overlay / "kustomization.yaml"
    tree = yaml.safe_load(file.read_text()) | changes
    file.write_text(yaml.safe_dump(tree))
    return render(file.parent)
