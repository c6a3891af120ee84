"""Against our own front: it takes every field the clients send, and its log can be replayed."""

import json
from pathlib import Path

import pytest

from api.tokenizer import Tokenizer
from batch.input_file import InputFile
from batch.job import Job
from batch.output_file import OutputFile
from batch.pacer import Pacer
from batch.sender import Sender
from load_generator.contract import make_contract
from load_generator.plan import make_plan
from load_generator.target import Target
from load_generator.trial import Trial, judge
from router.request import FinishReason, RoutedRequest, TokenBatch
from telemetry.config import TelemetryConfig
from tests.fake_router import Step
from tests.integration.api.conftest import KEY, model_path, open_site, tokenizer

__all__ = ["model_path", "tokenizer"]  # fixtures


def answering(request: RoutedRequest) -> list[Step]:
    """As many tokens as were asked for."""
    count = request.sampling.max_tokens
    steps: list[Step] = [TokenBatch([70 + n % 20]) for n in range(count - 1)]
    return [*steps, TokenBatch([90], FinishReason.LENGTH)]


async def test_a_contract_runs_against_our_front_and_its_log_is_replayed(
    model_path: Path, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "requests.jsonl"
    monkeypatch.setenv("TENANT_KEY", KEY)
    tree = {
        "model": "tiny",
        "revision": "main",
        "slo": {"error_rate": 0.0},
        "phases": [
            {
                "profile": "tenants",
                "requests": 12,
                "rate_per_s": 100,
                "tenants": [{"name": "a", "priority": 3, "api_key_env": "TENANT_KEY"}],
                "prompt_tokens": 40,
                "output_tokens": 5,
            },
            {"profile": "disturbed", "requests": 10, "rate_per_s": 100, "prompt_tokens": 20,
             "output_tokens": 6},
        ],
    }  # fmt: skip
    contract = make_contract(tree)
    telemetry = TelemetryConfig(request_log_file=str(log))
    async with open_site(model_path, tokenizer, strict=True, telemetry=telemetry) as site:
        site.router.script = answering
        target = Target(f"http://127.0.0.1:{site.ingress.http_port}")
        results = judge(contract, await Trial(contract, target).run(lambda _: None))
        assert {each.request.priority for each in site.router.generations} >= {3}
    assert all(result.is_met for result in results), [r.report.errors for r in results]
    assert results[0].report.num_completed == 12
    assert results[0].report.num_wrong_counts == 0
    assert results[0].report.parts_ms["prompt_time"].at(50) is not None
    assert results[1].report.num_cancelled >= 1
    again = make_contract(
        {
            "model": "tiny",
            "phases": [{"profile": "replay", "trace": str(log), "requests": 10}],
        }
    )
    plan = make_plan(again, again.phases[0])
    assert [each.num_prompt_tokens for each in plan[2:]] == [40] * 8
    assert [each.due_s for each in plan] == sorted(each.due_s for each in plan)


async def test_a_batch_runs_against_our_front(
    model_path: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    source = tmp_path / "in"
    body = {"model": "tiny", "prompt": "hello", "max_tokens": 4}
    rows = [
        {"custom_id": f"r{n}", "method": "POST", "url": "/v1/completions", "body": body}
        for n in range(8)
    ]
    rows[3]["body"] = {**body, "max_tokens": -1}
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    async with open_site(model_path, tokenizer, strict=True) as site:
        site.router.script = answering
        url = f"http://127.0.0.1:{site.ingress.http_port}"
        with OutputFile(tmp_path / "out") as output:
            async with Sender(url, priority=100, timeout_s=10) as sender:
                job = Job(InputFile(source), output, sender, Pacer(4), patience_s=10)
                await job.run()
            assert len(output.done) == 8
            assert output.num_failed == 1
        assert {each.request.priority for each in site.router.generations} == {100}
