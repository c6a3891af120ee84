"""A deployment replaces the replicas that would be made otherwise now, and no others."""

from pathlib import Path
from typing import Any

import pytest

from cluster.app import build
from cluster.replica_version import version_of
from cluster.siblings import enter_siblings
from tests.unit.cluster.test_replica_name import FakeStore

INGRESS, PREFILL, DECODE = "Ingress", "PrefillWorker", "DecodeWorker"


@pytest.fixture
def versions(tmp_path: Path) -> Any:
    token_file = tmp_path / "token"
    token_file.write_text("secret")
    (tmp_path / "model").mkdir()

    def of(salt: str = "", **sections: dict[str, Any]) -> dict[str, str]:
        """Name of each deployment -> its version."""
        args: dict[str, Any] = {"model": {"path": str(tmp_path / "model")}, **sections}
        args["cluster"] = {"token_file": str(token_file)}
        ingress = build(args, salt=salt)._bound_deployment
        pools = [pool._bound_deployment for pool in ingress.init_args[2:]]
        return {each.name: str(each.version) for each in (ingress, *pools)}

    return of


def changed(before: dict[str, str], after: dict[str, str]) -> set[str]:
    return {name for name in before if after[name] != before[name]}


def test_the_same_configuration_replaces_nothing_unless_asked_to(versions: Any) -> None:
    before = versions()
    assert set(before) == {INGRESS, PREFILL, DECODE}
    assert changed(before, versions()) == set()
    assert changed(before, versions(salt="again")) == set(before)


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({"decode": {"engine": {"max_num_seqs": 3}}}, {DECODE}),
        ({"engine": {"max_num_seqs": 3}}, {PREFILL, DECODE}),
        ({"kv_transfer": {"lease_s": 20}}, {PREFILL, DECODE}),
        ({"decode": {"replicas": 2}}, set()),
        ({"decode": {"drain_s": 60}}, {DECODE, INGRESS}),  # it waits for streams as long
        ({"router": {"migration_limit": 1}}, {INGRESS}),
        ({"ingress": {"http_port": 8001}}, {INGRESS}),
        ({"ingress": {"strict": True}}, {INGRESS}),
        ({"telemetry": {"sample_ratio": 0.5}}, {PREFILL, DECODE, INGRESS}),
        ({"rpc": {"port_range": "10200-10299"}}, {PREFILL, DECODE, INGRESS}),
        ({"decode": {"autoscaling": {"max": 2}}}, {INGRESS}),  # it decides how many there are
    ],
)
def test_a_change_replaces_who_reads_it(
    versions: Any, sections: dict[str, Any], expected: set[str]
) -> None:
    assert changed(versions(), versions(**sections)) == expected


def test_other_code_is_another_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    before = version_of({"a": 1})
    assert before == version_of({"a": 1}) != version_of({"a": 2})
    monkeypatch.setattr("cluster.replica_version.this_build", lambda: OtherBuild)
    assert version_of({"a": 1}) != before


class OtherBuild:
    digest = "another"


def test_siblings_know_each_other_before_either_listens() -> None:
    store = FakeStore(set())
    assert enter_siblings(store, "Ingress@node", 1, "a") == {1}
    assert enter_siblings(store, "Ingress@node", 2, "b") == {1, 2}
    assert enter_siblings(store, "Ingress@node", 1, "a") == {1, 2}  # asked for each port
    assert enter_siblings(store, "Ingress@other", 3, "c") == {3}
