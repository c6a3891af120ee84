"""Families that want something special of attention, over blocks in place: as gathered."""

from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.engine import Engine
from tests.paged_kernel import offer_kernel
from tests.tiny_families import FAMILIES
from tests.unit.engine.conftest import make_request, random_prompt, run, tokens_by_request

# Beyond every window, and more tokens than one step takes.
PROMPTS = {str(length): [i % 100 + 3 for i in random_prompt(length)] for length in (1, 9, 24)}


def serve(path: Path, attention: str) -> tuple[dict[str, list[int]], Engine]:
    engine = Engine(
        EngineConfig(
            model_path=str(path),
            block_size=4,
            num_kv_blocks=40,
            max_num_seqs=4,
            max_num_batched_tokens=9,
            attention=attention,
        )
    )
    engine.warm_up()
    for name, prompt in PROMPTS.items():
        engine.add_request(make_request(name, prompt, max_tokens=8))
    return tokens_by_request(run(engine)), engine


@pytest.mark.parametrize("name", ["gemma3", "deepseek v2"])
def test_tokens_are_those_of_gathered_attention(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    offer_kernel(monkeypatch)
    path = FAMILIES[name].save(tmp_path)
    expected, _ = serve(path, "torch")
    tokens, engine = serve(path, "paged")
    assert tokens == expected
    assert engine._launcher._graphs is not None
    assert engine._launcher._graphs.sizes == [1, 2, 4]


@pytest.mark.parametrize("name", ["gemma2", "gpt-oss"])
def test_caps_and_sinks_are_not_for_it(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    offer_kernel(monkeypatch)
    with pytest.raises(ValueError, match="Got attention = 'paged' but expected 'torch'"):
        serve(FAMILIES[name].save(tmp_path), "paged")
