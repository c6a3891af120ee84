"""The same greedy request gives the same tokens, however and by whomever it is served.

Columns: alone, batched, chunked, warm, preempted, aggregated, disaggregated. Rows: a tiny random
Llama in float64, where every token must be equal, and SmolLM2 in float32, where a difference counts
only if the best two logits of the solo run differ by more than 1e-4.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import EngineConfig
from engine.engine import Engine
from engine.request import Request
from engine.sampling.params import SamplingParams
from router.config import RouterConfig
from tests.cluster_processes import PATIENT, ClusterProcesses
from tests.reference import Truth, generate_truth
from tests.relay import generate, relay, until_quiet
from tests.tiny_model import make_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

DEMO_MODEL = Path(".models/smollm2-135m-instruct")
LENGTHS = {"below": 31, "exact": 32, "above": 33, "long": 77, "short": 5}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One model of the matrix with its prompts and truth."""

    path: Path
    dtype: str
    may_tie: bool
    num_tokens: int
    prompts: Mapping[str, list[int]]
    truth: Mapping[str, Truth]

    def check(self, tokens: Mapping[str, list[int]]) -> None:
        """Fail on the first prompt whose tokens differ."""
        assert tokens.keys() == self.prompts.keys()
        for name, token_ids in tokens.items():
            assert self.truth[name].agrees_with(token_ids, may_tie=self.may_tie), (
                f"{name}: got {token_ids} but expected {self.truth[name].token_ids}"
            )

    @property
    def engine_settings(self) -> dict[str, Any]:
        """Settings every engine of this row starts from."""
        return {
            "model_path": str(self.path),
            "dtype": self.dtype,
            "block_size": 32,
            "num_kv_blocks": 64,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 256,
            "max_model_len": 512,
            "num_threads": 1,
            "device": "cpu",
        }


def _make_row(path: Path, *, dtype: str, num_tokens: int, vocab_size: int) -> Row:
    torch.set_num_threads(1)
    draw = torch.Generator().manual_seed(3)
    prompts = {
        name: torch.randint(3, vocab_size, (length,), generator=draw).tolist()
        for name, length in LENGTHS.items()
    }
    # Two prompts that share their first blocks, so that batches and caches meet.
    prompts["sibling"] = prompts["long"][:64] + prompts["short"]
    truth = generate_truth(path, prompts, num_tokens=num_tokens, dtype=getattr(torch, dtype))
    return Row(
        path=path,
        dtype=dtype,
        may_tie=dtype != "float64",
        num_tokens=num_tokens,
        prompts=prompts,
        truth=truth,
    )


@pytest.fixture(scope="module", params=["tiny-float64", "smollm2-float32"])
def row(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Row:
    if request.param == "tiny-float64":
        path = make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")
        return _make_row(path, dtype="float64", num_tokens=20, vocab_size=320)
    assert DEMO_MODEL.exists(), "the demo model is not there: run make setup"
    return _make_row(DEMO_MODEL, dtype="float32", num_tokens=8, vocab_size=49_152)


def _run(engine: Engine, row: Row, *names: str, suffix: str = "") -> dict[str, list[int]]:
    """Serve these prompts together until none is left."""
    for name in names:
        engine.add_request(
            Request(
                request_id=name + suffix,
                token_ids=list(row.prompts[name]),
                num_prompt_tokens=len(row.prompts[name]),
                sampling_params=SamplingParams(
                    max_tokens=row.num_tokens, temperature=0.0, ignore_eos=True
                ),
            )
        )
    tokens: dict[str, list[int]] = {name: [] for name in names}
    while engine.has_work():
        for output in engine.step().outputs:
            tokens[output.request_id.removesuffix(suffix)].extend(output.token_ids)
    engine.check_integrity()
    counts = engine.block_counts()
    assert counts.used == counts.held == counts.quarantined == 0
    return tokens


def _engine(row: Row, **changes: Any) -> Engine:
    return Engine(EngineConfig(**{**row.engine_settings, **changes}))


def test_alone_and_warm(row: Row) -> None:
    engine = _engine(row)
    for turn in range(3):
        tokens = {}
        for name in row.prompts:
            tokens |= _run(engine, row, name, suffix=f"-{turn}")
        row.check(tokens)


def test_batched(row: Row) -> None:
    row.check(_run(_engine(row), row, *row.prompts))


def test_chunked(row: Row) -> None:
    row.check(_run(_engine(row, max_num_batched_tokens=16), row, *row.prompts))


def test_preempted(row: Row) -> None:
    engine = _engine(row, num_kv_blocks=26, block_size=4, max_model_len=100)
    row.check(_run(engine, row, *row.prompts))
    assert engine.load().num_preemptions > 0


@pytest.mark.parametrize("mode", ["aggregated", "disaggregated"])
async def test_cluster(row: Row, mode: str, tmp_path: Path) -> None:
    """All prompts at once, twice, so that the second round finds the caches warm."""
    num_prefill = 2 if mode == "disaggregated" else 0
    config = RouterConfig(local_prefill="never" if num_prefill else "auto")
    engine = {**row.engine_settings, "max_num_batched_tokens": 16}
    processes = ClusterProcesses(tmp_path, row.path, engine=engine, kv_transfer=PATIENT)
    try:
        workers = processes.ensure(prefill=num_prefill, decode=2)
        async with relay(processes, workers, config) as router:
            for turn in range(2):
                results = await asyncio.gather(
                    *(
                        generate(router, f"{name}-{turn}", prompt, max_tokens=row.num_tokens)
                        for name, prompt in row.prompts.items()
                    )
                )
                row.check(
                    {name: tokens for name, (tokens, _) in zip(row.prompts, results, strict=True)}
                )
                reports = [report for _, report in results]
                assert all(bool(each.prefill_worker_id) is bool(num_prefill) for each in reports)
                assert all(each.num_attempts == 1 for each in reports)
            assert sum(each.cached_tokens for each in reports) > 0
            await until_quiet(router)
    finally:
        processes.stop_all()
