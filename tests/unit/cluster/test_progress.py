"""What `relevo serve` and `relevo chat --stats` show."""

import io

from rich.console import Console

from cluster.chat import Answer, describe
from cluster.progress import Progress, WorkerWatch
from tests.fakes import FakeClock


def test_a_line_carries_the_seconds_since_the_start() -> None:
    clock, out = FakeClock(), io.StringIO()
    progress = Progress(Console(file=out, width=40), now=clock)
    clock.advance(2.5)
    progress.say("ray", "started: " + "x" * 60)
    assert out.getvalue() == f"   2.5 s  ray        started: {'x' * 60}\n"


def test_addresses_are_never_wrapped() -> None:
    out = io.StringIO()
    Progress(Console(file=out, width=20)).show(
        {"HTTP": "http://h:1/" + "v" * 40}, footer="curl [x]"
    )
    assert "http://h:1/" + "v" * 40 in out.getvalue()
    assert "curl [x]" in out.getvalue()


def test_each_change_of_a_worker_or_link_is_told_once() -> None:
    told: list[tuple[str, str]] = []
    watch = WorkerWatch(lambda phase, text: told.append((phase, text)))
    link = {"peer": "prefill-0", "state": "connecting", "backend": "gloo", "reason": ""}
    worker = {"id": "decode-0", "pool": "decode", "state": "ready", "pid": 7}
    worker |= {"kv": {"total": 64}, "links": [link]}
    mirrored = {"id": "prefill-0", "pool": "prefill", "state": "ready", "pid": 8, "links": [link]}
    watch.update({"workers": [worker]})
    watch.update({"workers": [worker, mirrored]})
    link["state"] = "ready"
    watch.update({"workers": [worker]})
    assert told == [
        ("decode-0", "ready (pid 7, 64 KV blocks)"),
        ("decode-0", "link decode-0 ← prefill-0: connecting (gloo)"),
        ("prefill-0", "ready (pid 8)"),
        ("decode-0", "link decode-0 ← prefill-0: ready (gloo)"),
    ]


def test_a_ready_worker_tells_what_its_memory_holds() -> None:
    told: list[str] = []
    memory = {"weights_bytes": 257 * 2**20, "kv_bytes": 12 * 2**20, "max_concurrency": 8}
    worker = {"id": "prefill-0", "pool": "prefill", "state": "ready", "pid": 7, "links": []}
    worker |= {"kv": {"total": 64}, "memory": memory}
    WorkerWatch(lambda _, text: told.append(text)).update({"workers": [worker]})
    assert told == [
        "ready (pid 7, weights 257 MiB, 64 KV blocks in 12 MiB, room for 8 longest requests)"
    ]


def test_the_statistics_of_each_ingress_are_told_once_and_never_while_idle() -> None:
    told: list[tuple[str, str]] = []
    watch = WorkerWatch(lambda phase, text: told.append((phase, text)))
    one = {"of": "ingress-0", "number": 0, "line": ""}
    other = {"of": "ingress-1", "number": 1, "line": "other 1"}
    for stats in (
        *(one, one, one | {"number": 1, "line": "one 1"}, other),
        *(one | {"number": 1, "line": "one 1"}, other, one | {"number": 2, "line": "one 2"}),
    ):
        watch.update({"workers": [], "stats": stats})
    assert told == [("stats", "one 1"), ("stats", "other 1"), ("stats", "one 2")]


def test_the_stats_of_an_answer() -> None:
    usage = {
        "prompt_tokens": 9,
        "completion_tokens": 11,
        "prompt_tokens_details": {"cached_tokens": 4},
        "queue_time": 0.001,
        "prompt_time": 0.05,
    }
    answer = Answer(usage=usage, first_token_s=0.1, total_s=1.1, finish_reason="stop")
    assert describe(answer) == (
        "TTFT 100 ms, 10.0 tokens/s, 11 tokens in 1.10 s, prompt 9 tokens, 4 cached,"
        " queue 1 ms, prompt 50 ms, stop"
    )
