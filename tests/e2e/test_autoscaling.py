"""A load step on a live cluster: both pools grow, both return, and no stream notices.

`make soak` runs it; in short `test_joined_cluster.py` lets one pool grow and shrink.
"""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.callers import Callers
from tests.long_form import LONG_FORM
from tests.served_cluster import ServedCluster

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(300), *LONG_FORM]

PROMPT = "The quick brown fox jumps over the lazy dog. " * 6
BODY = {"model": "tiny", "prompt": PROMPT, "max_tokens": 300, "temperature": 0, "ignore_eos": True}
CHANGE_WITHIN_S = 90.0


@pytest.fixture(scope="module")
def cluster(tiny_model: Path) -> Iterator[ServedCluster]:
    served = ServedCluster.start(
        tiny_model,
        "router.local_prefill=never",
        "engine.num_kv_blocks=400",  # of eight tokens: all places can be taken at once
        # A tiny model is never busy for long: what counts as busy is little here.
        "prefill.autoscaling.max=2",
        "prefill.autoscaling.busy_share=0.01",
        "prefill.autoscaling.up_delay_s=1",
        "prefill.autoscaling.down_delay_s=8",
        "decode.autoscaling.max=2",
        "decode.autoscaling.seqs_share=0.3",
        "decode.autoscaling.up_delay_s=1",
        "decode.autoscaling.down_delay_s=8",
    )
    try:
        served.wait_until_shown()
        yield served
    finally:
        served.stop()
    assert served.survivors() == []


def wait_until(cluster: ServedCluster, is_so: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    deadline = time.monotonic() + CHANGE_WITHIN_S
    while time.monotonic() < deadline:
        status = cluster.status()
        if is_so(status):
            return status
        time.sleep(0.2)
    raise AssertionError(f"it did not come: {cluster.status()}\n{cluster.output()}")


def serving(status: dict[str, Any]) -> tuple[int, int]:
    states = [(each["pool"], each["state"]) for each in status["workers"]]
    return states.count(("prefill", "ready")), states.count(("decode", "ready"))


def test_a_load_step_is_met_and_forgotten(cluster: ServedCluster) -> None:
    assert serving(cluster.status()) == (1, 1)
    with Callers(cluster.url, 1, BODY, is_cold=False) as steady:
        with Callers(cluster.url, 10, BODY) as crowd:
            grown = wait_until(cluster, lambda status: serving(status) == (2, 2))
        # One client goes on: it is on whichever worker is let go.
        shrunk = wait_until(cluster, lambda status: serving(status)[1] == 1)
        wait_until(cluster, lambda status: len(status["workers"]) < len(grown["workers"]))
    wait_until(cluster, lambda status: serving(status) == (1, 1))
    assert crowd.lost == steady.lost == []
    assert crowd.num_not_taken == steady.num_not_taken == 0
    assert len(set(crowd.texts) | set(steady.texts)) == 1
    assert "streams for 8 places" in grown["scaling"]["decode"]["reason"]
    assert grown["scaling"]["prefill"]["reason"]
    assert shrunk["scaling"]["decode"]["target"] == 1
    metrics = httpx.get(f"{cluster.url}/metrics", timeout=10).text
    assert 'relevo_workers_target{pool="decode"} 1' in metrics
    assert "decode     2 worker(s): " in cluster.output()


def test_the_names_of_living_workers_are_never_given_away(cluster: ServedCluster) -> None:
    # Serve gives the ranks of running replicas out anew when it lets one go; our numbers stay.
    wait_until(cluster, lambda status: serving(status) == (1, 1))
    before = {each["id"] for each in cluster.status()["workers"] if each["state"] == "ready"}
    with Callers(cluster.url, 10, BODY) as crowd:
        grown = wait_until(cluster, lambda status: serving(status) == (2, 2))
    ready = [each["id"] for each in grown["workers"] if each["state"] == "ready"]
    assert sorted(ready) == ["decode-0", "decode-1", "prefill-0", "prefill-1"]
    assert before < set(ready)
    assert crowd.lost == []
