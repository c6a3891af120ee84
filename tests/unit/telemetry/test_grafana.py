"""The dashboards ask for metrics that exist, and the files are those that the code makes."""

import json
import re
from pathlib import Path

import pytest
import yaml

from telemetry import grafana
from telemetry.metrics import INSTRUMENTS, InstrumentKind

DEPLOY = Path(__file__).resolve().parents[3] / "deploy"
KNOWN = {
    each.name + ending
    for each in INSTRUMENTS
    for ending in (
        ("_bucket", "_sum", "_count") if each.kind is InstrumentKind.HISTOGRAM else ("",)
    )
}


def names_in(query: str) -> set[str]:
    return set(re.findall(r"relevo_\w+", query))


@pytest.mark.parametrize("dashboard", grafana.DASHBOARDS, ids=lambda each: each.uid)
def test_every_query_asks_for_what_there_is(dashboard: grafana.Dashboard) -> None:
    for title, query in grafana.queries(grafana.render(dashboard)):
        assert names_in(query), title
        assert names_in(query) <= KNOWN, title
    for title, query in grafana.queries(grafana.render(dashboard, prefix=grafana.RAY_PREFIX)):
        assert re.findall(r"(?<!ray_)relevo_", query) == [], title


def test_no_metric_is_left_out() -> None:
    shown = {
        name
        for dashboard in grafana.DASHBOARDS
        for _, query in grafana.queries(grafana.render(dashboard))
        for name in names_in(query)
    }
    for each in INSTRUMENTS:
        # Failures stand in an alert, by their reason.
        if each.name != "relevo_kv_transfer_failures_total":
            assert any(name.startswith(each.name) for name in shown), each.name


def test_buckets_that_are_asked_for_exist() -> None:
    bounds = {each.name: {str(bound) for bound in each.buckets} for each in INSTRUMENTS}
    for dashboard in grafana.DASHBOARDS:
        for _, query in grafana.queries(grafana.render(dashboard)):
            for name, bound in re.findall(r'(relevo_\w+)_bucket\{le="([^"]+)"\}', query):
                assert bound in bounds[name], query


@pytest.mark.parametrize("prefix", ["", grafana.RAY_PREFIX])
def test_the_files_are_those_that_the_code_makes(prefix: str, tmp_path: Path) -> None:
    grafana.write(tmp_path, prefix=prefix)
    folder = DEPLOY / "grafana" / ("ray" if prefix else "")
    made = {path.name: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    assert {path.name: json.loads(path.read_text()) for path in folder.glob("*.json")} == made


def test_alerts_watch_what_there_is() -> None:
    document = yaml.safe_load((DEPLOY / "prometheus" / "relevo-alerts.yaml").read_text())
    rules = [rule for group in document["groups"] for rule in group["rules"]]
    assert len(rules) >= 8
    for rule in rules:
        assert names_in(rule["expr"]) <= KNOWN, rule["alert"]
        assert {"summary", "action"} <= rule["annotations"].keys()
