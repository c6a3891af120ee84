"""What `relevo status` shows of a worker."""

import httpx
import pytest

from cluster import status

WORKER = {
    "id": "decode-0",
    "pool": "decode",
    "pid": 7,
    "state": "ready",
    "running": 1,
    "waiting": 0,
    "transferring": 0,
    "heartbeat_age_s": 0.25,
    "kv": {"free": 3, "cached": 0, "used": 1, "held": 0, "quarantined": 0, "total": 4},
    "memory": {
        "weights_bytes": 513 * 2**20,
        "kv_bytes": 90 * 2**20,
        "buffer_bytes": 9 * 2**20,
        "max_concurrency": 12,
    },
    "links": [],
}
LOST = {**WORKER, "id": "decode-1", "state": "lost", "kv": {}, "memory": {}}


def shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *workers: object
) -> list[str]:
    body = {"state": "ready", "reasons": [], "workers": workers}
    transport = httpx.MockTransport(lambda _: httpx.Response(200, json=body))
    monkeypatch.setattr(
        status,
        "open_client",
        lambda *_, **__: httpx.Client(transport=transport, base_url="http://x"),
    )
    assert status.run("http://x", api_key="", as_json=False) == 0
    return capsys.readouterr().out.splitlines()


def test_a_worker_s_row_tells_its_blocks_and_its_memory(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = shown(monkeypatch, capsys, WORKER, LOST)
    row = next(line for line in lines if "decode-0" in line)
    assert "3 free, 1 used" in row
    assert "weights 513 + KV 90 + buffers 9 MiB, 12 of full length" in row
    lost = next(line for line in lines if "decode-1" in line)
    assert "MiB" not in lost


def test_each_pair_is_shown_with_its_backend_and_why_it_was_chosen(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    link = {
        "peer": "prefill-0",
        "state": "ready",
        "generation": 3,
        "backend": "shared_memory",
        "reason": "both pools lie in the memory of one host",
    }
    lines = shown(monkeypatch, capsys, {**WORKER, "pool": "decode", "links": [link]})
    row = next(line for line in lines if "prefill-0" in line)
    assert "decode-0" in row
    assert "shared_memory" in row
    assert "both pools lie in the memory of one host" in row
