"""What a person changes in an overlay: the images' digest, how upgrades go."""

from pathlib import Path

from tests.unit.deploy.manifests import render_with
from tests.unit.deploy.test_schemas import check_ray_service, validate


def test_one_line_pins_all_images_by_digest(tmp_path: Path) -> None:
    digest = f"sha256:{'0' * 64}"
    image = {"name": "relevo", "newName": "example.com/relevo", "digest": digest}
    every = render_with(tmp_path / "kubernetes", "multi-node", images=[image])
    for group in every.groups:
        assert group.images == [f"example.com/relevo@{digest}"]


def test_an_upgrade_in_steps_is_one_component_more(tmp_path: Path) -> None:
    components = ["../../components/models", "../../components/incremental-upgrade"]
    every = render_with(tmp_path / "kubernetes", "multi-node", components=components)
    check_ray_service(every)
    assert every.service["upgradeStrategy"]["type"] == "NewClusterWithIncrementalUpgrade"
    for group in every.workers:
        # KubeRay's Service takes whoever is ready, on the port of HTTP: ingresses alone.
        assert group.container["readinessProbe"]["httpGet"]["path"] == "/ready"
    for budget in every.of_kind("PodDisruptionBudget"):
        validate(budget)
