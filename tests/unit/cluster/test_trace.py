"""The waterfall of a request in a terminal."""

from typing import Any

from rich.console import Console

from cluster.trace import show


def span(name: str, parent: str | None, start_s: float, duration_s: float, **more: Any) -> Any:
    empty: dict[str, Any] = {"attributes": {}, "events": [], "links": [], "error": None}
    return {
        **empty,
        "name": name,
        "span_id": name,
        "parent_id": parent,
        "process": "somewhere",
        "start_s": start_s,
        "duration_s": duration_s,
        **more,
    }


def shown(*spans: Any) -> list[str]:
    console = Console(width=140, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    trace = {"request_id": "r-1", "trace_id": "t", "duration_s": 1.0, "num_dropped_spans": 0}
    show({**trace, "spans": list(spans)}, console)
    return console.export_text().splitlines()


def test_parts_stand_below_their_parents_and_bars_where_their_time_is() -> None:
    lines = shown(
        span("request", "remote", 0.0, 1.0),
        span("attempt", "request", 0.0, 1.0),
        span("decode", "attempt", 0.5, 0.5),
        span("prefill", "attempt", 0.0, 0.5),
    )
    rows = [line for line in lines if "━" in line]
    assert [row.split()[0] for row in rows] == ["request", "attempt", "decode", "prefill"]
    assert rows[2].startswith(" " * 5 + "decode")
    assert rows[0].count("━") == 40
    assert rows[2].index("━") > rows[3].rindex("━")


def test_the_sums_and_what_the_router_weighed_are_told() -> None:
    text = "\n".join(
        shown(
            span(
                "request",
                None,
                0.0,
                1.0,
                attributes={"relevo.first_token.queue_s": 0.1, "relevo.first_token.wire_s": 0.2},
                events=[{"name": "migrated", "at_s": 0.5, "attributes": {"relevo.cause": "lost"}}],
            ),
            span(
                "route",
                "request",
                0.0,
                0.1,
                attributes={
                    "relevo.decode.worker": "decode-0",
                    "relevo.prefill.worker": "",
                    "relevo.cost.prefill_s": 0.01,
                    "relevo.cost.total_s": 0.01,
                },
            ),
            span("attempt", "request", 0.0, 0.4, error="lost: no sign of life"),
        )
    )
    assert "first token = queue 100.0 + wire 200.0 = 300.0 ms" in text
    assert "chosen alone -> decode-0: 10.0 ms (prefill 10.0)" in text
    assert "500.0 ms: migrated cause lost" in text
    assert "attempt: lost: no sign of life" in text
