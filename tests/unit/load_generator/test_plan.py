"""What a phase sends is decided beforehand, by its seed alone."""

import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from load_generator.contract import ContractError, make_contract
from load_generator.plan import SLOW, make_plan
from load_generator.planned_request import PlannedRequest

PHASE: dict[str, Any] = {"profile": "short-short", "requests": 200, "rate_per_s": 10}


def plan(contract: dict[str, Any] | None = None, **phase: Any) -> list[PlannedRequest]:
    tree = {"model": "m", **(contract or {}), "phases": [{**PHASE, **phase}]}
    made = make_contract(tree)
    return make_plan(made, made.phases[0])


def body(request: PlannedRequest) -> dict[str, Any]:
    return dict(json.loads(request.body))


def test_the_same_seed_gives_the_same_requests_and_another_one_others() -> None:
    assert plan() == plan()
    assert plan()[0].body != plan({"seed": 2})[0].body


def test_poisson_arrivals_have_the_asked_rate_and_no_rhythm() -> None:
    due = [request.due_s for request in plan(requests=3000)]
    gaps = [later - earlier for earlier, later in itertools.pairwise(due)]
    mean = sum(gaps) / len(gaps)
    variance = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
    assert mean == pytest.approx(0.1, rel=0.1)
    assert variance == pytest.approx(mean**2, rel=0.2)  # as of an exponential


def test_fixed_arrivals_come_by_the_clock() -> None:
    due = [request.due_s for request in plan(arrivals="fixed", requests=5)]
    assert due == pytest.approx([0.0, 0.1, 0.2, 0.3, 0.4])


def test_a_body_asks_for_what_was_planned() -> None:
    for request in plan(prompt_tokens={"low": 5, "high": 9}, output_tokens=7)[:20]:
        sent = body(request)
        assert len(sent["prompt"]) == request.num_prompt_tokens
        assert 5 <= request.num_prompt_tokens <= 9
        assert all(100 <= token < 300 for token in sent["prompt"])
        assert (sent["max_tokens"], sent["ignore_eos"], sent["temperature"]) == (7, True, 0)
        assert sent["stream_options"] == {"include_usage": True}


def test_prompts_go_as_text_or_chat_too() -> None:
    text = body(plan({"prompts": "text"}, prompt_tokens=6)[0])["prompt"]
    assert len(text.split()) == 6
    chat = body(plan({"prompts": "chat"}, prompt_tokens=6)[0])
    assert len(chat["messages"][0]["content"].split()) == 6


def test_the_contract_may_add_fields_and_take_them_away() -> None:
    sent = body(plan({"extra_body": {"ignore_eos": None, "top_k": 3}})[0])
    assert "ignore_eos" not in sent
    assert sent["top_k"] == 3


def test_a_shared_prefix_is_the_same_in_every_prompt() -> None:
    first, second = (body(each)["prompt"] for each in plan(shared_prefix_tokens=64)[:2])
    assert first[:64] == second[:64]
    assert first[64:] != second[64:]


def test_tenants_send_their_share_with_their_priority_and_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KEY_OF_A", "sk-a")
    tenants = [
        {"name": "a", "share": 3, "priority": 1, "api_key_env": "KEY_OF_A"},
        {"name": "b", "output_tokens": 99},
    ]
    made = plan(tenants=tenants, requests=400)
    counts = Counter(request.group for request in made)
    assert 0.65 < counts["a"] / 400 < 0.85
    for request in made:
        sent = body(request)
        if request.group == "a":
            assert sent["priority"] == 1
            assert request.headers == {"authorization": "Bearer sk-a"}
        else:
            assert "priority" not in sent
            assert sent["max_tokens"] == 99


def test_a_key_that_is_nowhere_is_told() -> None:
    with pytest.raises(ContractError, match="no NOWHERE with its key"):
        plan(tenants=[{"name": "a", "api_key_env": "NOWHERE"}])


def test_slow_readers_and_cancels_have_their_share() -> None:
    made = plan(slow_share=0.25, cancel_share=0.5, resend_share=0.5, requests=400)
    slow = [request for request in made if request.group == SLOW]
    assert 0.15 < len(slow) / 400 < 0.35
    assert all((request.read_tokens_per_s is not None) == (request in slow) for request in made)
    cancelled = [request for request in made if request.cancel_after_tokens is not None]
    assert 0.4 < len(cancelled) / 400 < 0.6
    assert 0.3 < sum(request.resends for request in cancelled) / len(cancelled) < 0.7
    for request in cancelled:
        assert request.cancel_after_tokens is not None
        assert 1 <= request.cancel_after_tokens < request.num_output_tokens


def write_trace(path: Path, rows: list[tuple[int, int, int, list[int]]]) -> Path:
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    path.write_text("".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in rows))
    return path


def test_a_replay_keeps_times_lengths_and_what_was_shared(tmp_path: Path) -> None:
    rows = [(1000, 1200, 10, [7, 8, 9]), (3000, 1100, 20, [7, 8, 4]), (3500, 600, 5, [1, 2])]
    path = write_trace(tmp_path / "t.jsonl", rows)
    made = plan(profile="replay", trace=path, rate_per_s=None)
    assert [request.due_s for request in made] == [0.0, 2.0, 2.5]
    prompts = [body(request)["prompt"] for request in made]
    assert [len(prompt) for prompt in prompts] == [1200, 1100, 600]
    assert [request.num_output_tokens for request in made] == [10, 20, 5]
    assert prompts[0][:1024] == prompts[1][:1024]
    assert prompts[0][1024:1100] != prompts[1][1024:]
    assert prompts[2][:512] != prompts[0][:512]


def test_a_replay_can_be_smaller_faster_and_bounded(tmp_path: Path) -> None:
    rows = [(0, 5120, 100, list(range(10))), (4000, 5120, 100, [*range(9), 99])]
    path = write_trace(tmp_path / "t.jsonl", rows)
    made = plan(profile="replay", trace=path, rate_per_s=1.0, token_scale=0.1, max_tokens=400)
    assert [request.due_s for request in made] == [0.0, 1.0]
    assert [(each.num_prompt_tokens, each.num_output_tokens) for each in made] == [(390, 10)] * 2
    first, second = (body(each)["prompt"] for each in made)
    assert first == second  # what differs lies behind the cut


def test_a_replay_may_come_at_random(tmp_path: Path) -> None:
    rows = [(1000 * n, 20, 3, [n]) for n in range(50)]
    path = write_trace(tmp_path / "t.jsonl", rows)
    made = plan(profile="replay", trace=path, arrivals="poisson", rate_per_s=20.0, requests=50)
    assert len(made) == 50
    assert made[-1].due_s < 10
