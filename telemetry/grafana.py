"""Four Grafana dashboards as data: `python -m telemetry.grafana deploy/grafana`.

A panel is a title, a unit and PromQL over the instruments of `telemetry.metrics`; a test holds that
each of these exists. The same panels serve both places where the numbers are: an ingress's
`/metrics`, and Ray's own endpoints, which put `ray_` in front of every name.
"""

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

RAY_PREFIX: Final = "ray_"
_WIDTH, _HEIGHT, _COLUMNS = 8, 7, 3
_WINDOW = "$__rate_interval"


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One picture."""

    title: str
    unit: str  # Grafana's name of it
    queries: tuple[tuple[str, str], ...]  # PromQL and legend
    description: str = ""
    kind: str = "timeseries"  # or stat
    thresholds: tuple[float, ...] = ()  # green below the first, then yellow, then red


@dataclass(frozen=True, slots=True, kw_only=True)
class Dashboard:
    """One page of pictures."""

    uid: str
    title: str
    panels: tuple[Panel, ...]


def _rate(name: str, by: str = "") -> str:
    return f"sum{f' by ({by})' if by else ''} (rate({name}[{_WINDOW}]))"


def _quantile(share: float, name: str, by: str = "le") -> str:
    return f"histogram_quantile({share}, sum by ({by}) (rate({name}_bucket[{_WINDOW}])))"


def _quantiles(name: str) -> tuple[tuple[str, str], ...]:
    return tuple((_quantile(share, name), f"p{share * 100:g}") for share in (0.5, 0.95, 0.99))


def _mean(name: str, by: str) -> str:
    return f"{_rate(name + '_sum', by)} / {_rate(name + '_count', by)}"


_TTFT, _ITL = "relevo_time_to_first_token_seconds", "relevo_inter_token_latency_seconds"
_ERROR_SHARE = (
    '(sum(rate(relevo_requests_finished_total{finish_reason="error"}[W])) or vector(0))'
    " / clamp_min(sum(rate(relevo_requests_finished_total[W])), 0.001)"
).replace("W", _WINDOW)
_HIT_SHARE = (
    '(sum(rate(relevo_prompt_tokens_total{source=~"cached.*"}[W])) or vector(0))'
    " / clamp_min(sum(rate(relevo_prompt_tokens_total[W])), 0.001)"
).replace("W", _WINDOW)
_USED_SHARE = (
    'sum by (worker) (relevo_kv_blocks{state=~"used|held|quarantined"})'
    " / sum by (worker) (relevo_kv_blocks)"
)


def _within(bound: str, name: str) -> str:
    """Share of the observations at or below a bucket's bound."""
    return (
        f'sum(rate({name}_bucket{{le="{bound}"}}[{_WINDOW}]))'
        f" / clamp_min(sum(rate({name}_count[{_WINDOW}])), 0.001)"
    )


# fmt: off
DASHBOARDS: Final = (
    Dashboard(uid="relevo-overview", title="Relevo: overview", panels=(
        Panel(title="Requests", unit="reqps", kind="stat",
              queries=((_rate("relevo_requests_finished_total"), ""),)),
        Panel(title="First token p95", unit="s", kind="stat", thresholds=(1.0, 3.0),
              queries=((_quantile(0.95, _TTFT), ""),)),
        Panel(title="Errors", unit="percentunit", kind="stat", thresholds=(0.01, 0.05),
              queries=((_ERROR_SHARE, ""),)),
        Panel(title="Requests by end", unit="reqps",
              queries=((_rate("relevo_requests_finished_total", "finish_reason"),
                        "{{finish_reason}}"),)),
        Panel(title="Tokens", unit="short", description="Tokens per second",
              queries=((_rate("relevo_generation_tokens_total"), "output"),
                       (_rate("relevo_prompt_tokens_total", "source"), "prompt, {{source}}"))),
        Panel(title="Time to first token", unit="s", queries=_quantiles(_TTFT)),
        Panel(title="Between tokens", unit="s", queries=_quantiles(_ITL)),
        Panel(title="Whole request", unit="s",
              queries=_quantiles("relevo_request_duration_seconds")),
        Panel(title="Workers", unit="short",
              queries=(("max by (pool, state) (relevo_workers)", "{{pool}} {{state}}"),)),
        Panel(title="Autoscaling", unit="short",
              description="Workers wanted, and what the present load alone asks for",
              queries=(("max by (pool) (relevo_workers_target)", "{{pool}} wanted"),
                       ("max by (pool) (relevo_workers_demand)", "{{pool}} by load"))),
    )),
    Dashboard(uid="relevo-workers", title="Relevo: prefill, decode, KV", panels=(
        Panel(title="Running", unit="short",
              queries=(("max by (pool, worker) (relevo_requests_running)", "{{worker}}"),)),
        Panel(title="Waiting", unit="short", thresholds=(10.0, 50.0),
              queries=(("max by (pool, worker) (relevo_requests_waiting)", "{{worker}}"),)),
        Panel(title="Handing over", unit="short",
              queries=(("max by (pool, worker) (relevo_requests_transferring)", "{{worker}}"),)),
        Panel(title="KV blocks by state", unit="short",
              queries=(("sum by (pool, state) (relevo_kv_blocks)", "{{pool}} {{state}}"),)),
        Panel(title="KV in use", unit="percentunit", thresholds=(0.8, 0.95),
              queries=((_USED_SHARE, "{{worker}}"),)),
        Panel(title="Leases", unit="short",
              queries=(("max by (worker) (relevo_kv_leases_open)", "{{worker}} open"),
                       (_rate("relevo_lease_expired_total", "worker"), "{{worker}} expired/s"))),
        Panel(title="KV moved", unit="Bps",
              queries=((_rate("relevo_kv_transfer_bytes_total", "worker"), "{{worker}}"),)),
        Panel(title="A hand-over takes", unit="s",
              queries=_quantiles("relevo_kv_transfer_seconds")),
        Panel(title="Links", unit="short",
              queries=(("max by (state) (relevo_links)", "{{state}}"),)),
        Panel(title="What went wrong", unit="short", description="Per second",
              queries=((_rate("relevo_kv_digest_mismatches_total"), "digest mismatches"),
                       (_rate("relevo_kv_fenced_messages_total"), "stale messages refused"),
                       (_rate("relevo_preemptions_total", "worker"), "{{worker}} preemptions"))),
    )),
    Dashboard(uid="relevo-router", title="Relevo: router", panels=(
        Panel(title="Waiting for workers", unit="short", thresholds=(10.0, 50.0),
              queries=(("sum(relevo_router_waiting_requests)", "queue"),)),
        Panel(title="Where the first token's time went", unit="s", description="Means",
              queries=((_mean("relevo_ttft_part_seconds", "part"), "{{part}}"),)),
        Panel(title="From the first token to the second", unit="s", description="Means",
              queries=((_mean("relevo_second_token_part_seconds", "part"), "{{part}}"),)),
        Panel(title="Prompt tokens nobody computed", unit="percentunit",
              queries=((_HIT_SHARE, "hits"),)),
        Panel(title="Cached tokens: predicted minus found", unit="short",
              queries=_quantiles("relevo_predicted_cached_tokens_error")),
        Panel(title="Refused and moved on", unit="reqps",
              queries=((f"{_rate('relevo_admission_rejected_total')} or vector(0)", "refused"),
                       (f"{_rate('relevo_migrations_total')} or vector(0)", "migrated"))),
    )),
    Dashboard(uid="relevo-slo", title="Relevo: objectives", panels=(
        Panel(title="First token within 1 s", unit="percentunit", kind="stat",
              queries=((_within("1.0", _TTFT), ""),)),
        Panel(title="Next token within 50 ms", unit="percentunit", kind="stat",
              queries=((_within("0.05", _ITL), ""),)),
        Panel(title="Served without an error", unit="percentunit", kind="stat",
              queries=((f"1 - {_ERROR_SHARE}", ""),)),
        Panel(title="First token within", unit="percentunit",
              queries=((_within("0.25", _TTFT), "250 ms"), (_within("1.0", _TTFT), "1 s"),
                       (_within("2.5", _TTFT), "2.5 s"))),
        Panel(title="Next token within", unit="percentunit",
              queries=((_within("0.025", _ITL), "25 ms"), (_within("0.05", _ITL), "50 ms"),
                       (_within("0.1", _ITL), "100 ms"))),
        Panel(title="Errors", unit="percentunit", thresholds=(0.01, 0.05),
              queries=((_ERROR_SHARE, "share"),)),
    )),
)
# fmt: on


def render(dashboard: Dashboard, *, prefix: str = "") -> dict[str, Any]:
    """Return Grafana's JSON; `prefix` comes before the name of every metric."""
    return {
        "uid": f"{dashboard.uid}{'-ray' if prefix else ''}",
        "title": f"{dashboard.title}{' (through Ray)' if prefix else ''}",
        "id": None,
        "tags": ["relevo"],
        "schemaVersion": 39,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {
            "list": [{"name": "datasource", "label": "Data source", "type": "datasource",
                      "query": "prometheus", "current": {}}]
        },
        "links": [{"type": "dashboards", "tags": ["relevo"], "title": "Relevo", "asDropdown": True,
                   "includeVars": True, "keepTime": True}],
        "panels": [
            _render_panel(panel, number, prefix) for number, panel in enumerate(dashboard.panels)
        ],
    }  # fmt: skip


def _render_panel(panel: Panel, number: int, prefix: str) -> dict[str, Any]:
    row, column = divmod(number, _COLUMNS)
    colors = ("green", "yellow", "red")
    steps = [{"color": color, "value": bound} for color, bound in
             zip(colors, (None, *panel.thresholds), strict=False)]  # fmt: skip
    return {
        "id": number + 1,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "gridPos": {"x": column * _WIDTH, "y": row * _HEIGHT, "w": _WIDTH, "h": _HEIGHT},
        "fieldConfig": {
            "defaults": {
                "unit": panel.unit,
                "noValue": "no traffic",
                "thresholds": {"mode": "absolute", "steps": steps},
                "custom": {"fillOpacity": 10, "showPoints": "never"},
            },
            "overrides": [],
        },
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "expr": query.replace("relevo_", f"{prefix}relevo_"),
                "legendFormat": legend or "__auto",
                "datasource": {"type": "prometheus", "uid": "${datasource}"},
            }
            for index, (query, legend) in enumerate(panel.queries)
        ],
    }


def queries(dashboard: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the panel's title and each of its queries, out of Grafana's JSON."""
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            yield panel["title"], target["expr"]


def write(folder: Path, *, prefix: str = "") -> None:
    """Write every dashboard as a file."""
    folder.mkdir(parents=True, exist_ok=True)
    for dashboard in DASHBOARDS:
        made = render(dashboard, prefix=prefix)
        path = folder / f"{made['uid']}.json"
        path.write_text(json.dumps(made, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
    write(Path(sys.argv[1]) / "ray", prefix=RAY_PREFIX)
