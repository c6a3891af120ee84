"""Who may talk to whom in Kubernetes: what is listed, and nothing else."""

from functools import cache
from typing import Any

import pytest

from cluster.config import load_config
from tests.unit.deploy.manifests import KUBERNETES, OVERLAYS, Group, Rendered, rendered

# Of Linux' own ephemeral ports, from which Gloo and NCCL take theirs: the ends and one between.
EPHEMERAL = {32768, 50000, 60999}
RAY_HEAD = {6379, 8265, 10001}  # GCS, dashboard, client
KNOWN = {53, 443, 4317, *range(6370, 6390), *range(7990, 10400), 52365} | EPHEMERAL
WORKER, INGRESS = "relevo/worker", "relevo/ingress"

pytestmark = pytest.mark.parametrize("overlay", OVERLAYS)


def ports(rule: dict[str, Any]) -> set[int]:
    """The ports of a rule, of those that anything of ours or Ray's may listen on."""
    ranges = [(each["port"], each.get("endPort", each["port"])) for each in rule.get("ports", ())]
    return {port for port in KNOWN if any(low <= port <= high for low, high in ranges)}


def pods(rendered: Rendered, selector: dict[str, Any]) -> list[Group]:
    return [group for group in rendered.groups if group.is_selected(selector)]


@cache
def allowed(overlay: str, direction: str) -> dict[tuple[str, str], set[int]]:
    """(whose rule, the other pod) -> the ports that all rules between them name."""
    every, side = rendered(overlay), {"ingress": "from", "egress": "to"}[direction]
    found: dict[tuple[str, str], set[int]] = {}
    for policy in every.policies():
        for rule in policy.get(direction, ()):
            numbers = ports(rule)
            for peer in rule.get(side, ()):
                if "namespaceSelector" in peer:
                    continue
                for group in pods(every, policy["podSelector"]):
                    for other in pods(every, peer["podSelector"]):
                        found.setdefault((group.name, other.name), set()).update(numbers)
    return found


def reachable(overlay: str, source: Group, target: Group) -> set[int]:
    """Ports of `target` that `source` may call: both sides must allow it."""
    leaving = allowed(overlay, "egress").get((source.name, target.name), set())
    return leaving & allowed(overlay, "ingress").get((target.name, source.name), set())


def ray_ports(group: Group) -> set[int]:
    """The ports that Ray listens on in these pods, as it is told."""
    single = {
        int(value)
        for key, value in group.ray_params.items()
        if key.endswith("-port") and key not in {"min-worker-port", "max-worker-port"}
    }
    low, high = (int(group.ray_params[f"{end}-worker-port"]) for end in ("min", "max"))
    return single | set(range(low, high + 1))


def test_nothing_is_open_unless_it_is_listed(overlay: str) -> None:
    every = rendered(overlay)
    closed = [each for each in every.policies() if not {"ingress", "egress"} & set(each)]
    (policy,) = closed
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    assert all(group.is_selected(policy["podSelector"]) for group in every.groups)


def test_ingresses_call_workers_and_workers_each_other(overlay: str) -> None:
    every = rendered(overlay)
    config = load_config(KUBERNETES / "overlays" / overlay / "relevo.yaml", environ={})
    rpc = set(config.rpc.ports())
    for source in every.groups:
        for target in every.groups:
            found = reachable(overlay, source, target)
            may_call = WORKER in target.labels and {WORKER, INGRESS} & set(source.labels)
            assert found & rpc == (rpc if may_call else set()), (source.name, target.name)


def test_kv_flows_between_workers_only(overlay: str) -> None:
    every = rendered(overlay)
    for source in every.groups:
        for target in every.groups:
            found = reachable(overlay, source, target) & EPHEMERAL
            both = WORKER in source.labels and WORKER in target.labels
            assert found == (EPHEMERAL if both else set()), (source.name, target.name)


def test_ray_reaches_ray_and_its_ports_are_no_others(overlay: str) -> None:
    every = rendered(overlay)
    config = load_config(KUBERNETES / "overlays" / overlay / "relevo.yaml", environ={})
    ours = set(config.rpc.ports()) | EPHEMERAL
    ours |= {config.ingress.http_port, config.ingress.grpc_port}
    for target in every.groups:
        # The metrics port is Prometheus', not Ray's own.
        listening = ray_ports(target) - {int(target.ray_params["metrics-export-port"])}
        listening |= RAY_HEAD if target.name == "head" else set()
        assert not listening & ours
        for source in every.groups:
            assert listening <= reachable(overlay, source, target), (source.name, target.name)


def test_strangers_reach_the_ingresses_and_what_watches_the_metrics(overlay: str) -> None:
    every = rendered(overlay)
    from_outside = [
        (policy["podSelector"], peer, ports(rule))
        for policy in every.policies()
        for rule in policy.get("ingress", ())
        for peer in rule["from"]
        if "namespaceSelector" in peer
    ]
    by_label = {}
    for selector, peer, numbers in from_outside:
        who = peer["namespaceSelector"].get("matchLabels") or peer["podSelector"]["matchLabels"]
        (label,) = who.items()
        by_label[label] = (numbers, {group.name for group in pods(every, selector)})
    ingresses = {group.name for group in every.groups if INGRESS in group.labels}
    assert by_label == {
        ("relevo/clients", "true"): ({8000, 9000}, ingresses),
        ("relevo/monitoring", "true"): ({8000, 8080}, {group.name for group in every.groups}),
        ("app.kubernetes.io/name", "kuberay-operator"): ({8265}, {"head"}),
    }


def test_names_can_be_looked_up(overlay: str) -> None:
    every = rendered(overlay)
    dns = [
        policy["podSelector"]
        for policy in every.policies()
        for rule in policy.get("egress", ())
        if {(each["protocol"], each["port"]) for each in rule["ports"]}
        == {("UDP", 53), ("TCP", 53)}
    ]
    (selector,) = dns
    assert all(group.is_selected(selector) for group in every.groups)


def test_our_service_shows_ingresses_and_none_of_the_ports_inside(overlay: str) -> None:
    every = rendered(overlay)
    (service,) = every.of_kind("Service")
    assert {port["targetPort"] for port in service["spec"]["ports"]} == {8000, 9000}
    assert service["spec"].get("type", "ClusterIP") == "ClusterIP"
    chosen = pods(every, {"matchLabels": service["spec"]["selector"]})
    assert [group.name for group in chosen] == [
        group.name for group in every.groups if INGRESS in group.labels
    ]
    assert every.service["excludeHeadPodFromServeSvc"] is True
