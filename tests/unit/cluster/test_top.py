"""The live picture in a terminal."""

from typing import Any

from rich.console import Console

from cluster.top import BAR_CELLS, Rates, draw

TRAFFIC = {
    "requests_per_s": 1.5,
    "prompt_tokens_per_s": 20.0,
    "output_tokens_per_s": 30.0,
    "error_share": None,
    "cache_hit_share": 0.25,
    "first_token_p50_s": 0.1,
    "first_token_p95_s": 0.2,
    "inter_token_p50_s": None,
    "inter_token_p95_s": None,
}


def picture(*, uptime_s: float = 10.0, moved_bytes: int = 0) -> dict[str, Any]:
    link = {"peer": "prefill-0", "generation": 1, "state": "ready", "backend": "gloo"}
    return {
        "state": "degraded",
        "reasons": ["[bold]odd[/] reason"],
        "model": "tiny",
        "uptime_s": uptime_s,
        "running": 2,
        "queued": 3,
        "traffic": TRAFFIC,
        "workers": [
            {
                "id": "decode-0",
                "pool": "decode",
                "state": "ready",
                "running": 4,
                "waiting": 5,
                "transferring": 6,
                "kv": {"used": 10, "held": 0, "cached": 20, "free": 10, "total": 40},
                "links": [{**link, "moved_bytes": moved_bytes, "reason": ""}],
            }
        ],
        "routes": [
            {
                "request_id": "r" * 32,
                "chosen": {
                    "prefill": None,
                    "decode": "decode-0",
                    "cost": {"queue_s": 0.0, "prefill_s": 0.02, "total_s": 0.02},
                },
            }
        ],
        "events": [{"at": 0.0, "level": "bad", "text": "decode-1 is lost"}],
    }


def text(*pictures: dict[str, Any]) -> str:
    rates, console = Rates(), Console(width=140)
    drawn = [draw(each, rates) for each in pictures]
    with console.capture() as captured:
        console.print(drawn[-1])
    return captured.get()


def test_every_part_of_the_picture_is_there() -> None:
    shown = text(picture())
    assert "degraded" in shown
    assert "[bold]odd[/] reason" in shown  # text from elsewhere is no markup
    assert "100.0 / 200.0" in shown
    assert "10 used, 20 cached, 10 free" in shown
    assert shown.count("█") == BAR_CELLS
    assert "alone -> decode-0" in shown
    assert "prefill 20.0" in shown
    assert "decode-1 is lost" in shown


def test_links_show_what_moved_since_the_picture_before() -> None:
    shown = text(picture(), picture(uptime_s=12.0, moved_bytes=6_000_000))
    assert "3.0" in next(line for line in shown.splitlines() if "prefill-0 -> decode-0" in line)
