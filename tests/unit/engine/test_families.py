"""Every family of models, served in every way, says what transformers' generate() says."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.config import EngineConfig
from engine.engine import Engine
from tests.tiny_families import FAMILIES, VOCAB_SIZE, Family
from tests.unit.engine.conftest import generate, make_request, run, tokens_by_request
from tests.unit.engine.handing_over import hand_over

BLOCK_SIZE = 4
NUM_TOKENS = 8


def random_prompt(length: int) -> list[int]:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist()


# The longer ones reach past every window.
PROMPTS = {str(length): random_prompt(length) for length in (1, 9, 24)}
LONGEST = PROMPTS["24"]


def slow_truth(model: torch.nn.Module, prompt: list[int]) -> list[int]:
    output = model.generate(torch.tensor([prompt]), max_new_tokens=NUM_TOKENS, do_sample=False)
    return output[0, len(prompt) :].tolist()


class Served:
    """One family's checkpoint, its truth, and two engines on it."""

    def __init__(self, family: Family, directory: Path) -> None:
        self.family = family
        self.path = family.save(directory)
        self.reference = AutoModelForCausalLM.from_pretrained(
            self.path, attn_implementation="eager", experts_implementation="eager"
        )
        self.truth = {name: slow_truth(self.reference, prompt) for name, prompt in PROMPTS.items()}
        # Their pools cannot hold all prompts at once: somebody is preempted.
        self.engine = self._make_engine(attention="auto")
        self.peer = self._make_engine(
            attention="torch"
        )  # one kind of attention goes on from the other

    def _make_engine(self, attention: str) -> Engine:
        return Engine(
            EngineConfig(
                model_path=str(self.path),
                block_size=BLOCK_SIZE,
                num_kv_blocks=12,
                max_num_seqs=4,
                max_num_batched_tokens=9,
                attention=attention,
            )
        )


@pytest.fixture(scope="module", params=FAMILIES)
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    torch.set_num_threads(1)
    served = Served(FAMILIES[request.param], tmp_path_factory.mktemp("family"))
    yield served
    for engine in (served.engine, served.peer):
        engine.check_integrity()
        counts = engine.block_counts()
        assert counts.free + counts.cached == counts.total


def test_alone_in_chunks_then_from_the_cache(served: Served):
    for name, prompt in PROMPTS.items():
        for attempt in range(2):
            request = make_request(f"{name}-{attempt}", prompt, max_tokens=NUM_TOKENS)
            assert generate(served.engine, request) == served.truth[name]
            full_blocks = (len(prompt) - 1) // BLOCK_SIZE
            assert request.num_cached_tokens == (full_blocks * BLOCK_SIZE if attempt else 0)


def test_together_and_preempted(served: Served):
    num_before = served.engine.load().num_preemptions
    for name, prompt in PROMPTS.items():
        # Its own salt: nothing comes from the cache.
        served.engine.add_request(
            make_request(name, prompt, max_tokens=NUM_TOKENS, cache_salt="together")
        )
    assert tokens_by_request(run(served.engine)) == served.truth
    assert served.engine.load().num_preemptions > num_before


def test_handed_over(served: Served):
    tokens = {}
    for name, prompt in PROMPTS.items():
        request = {"max_tokens": NUM_TOKENS, "cache_salt": "handed over"}
        tokens |= hand_over(served.peer, served.engine, {name: prompt}, **request)
    assert tokens == served.truth


@pytest.mark.parametrize("name", [name for name in FAMILIES if FAMILIES[name].without])
def test_what_is_special_about_it_decides_the_text(name: str):
    family = FAMILIES[name]
    assert family.without is not None
    whole, plain = rebuilt(family), rebuilt(family, **family.without)
    plain.load_state_dict(whole.state_dict(), strict=False)
    assert slow_truth(whole, LONGEST) != slow_truth(plain, LONGEST)


def test_sinks_decide_the_text():
    model = rebuilt(FAMILIES["gpt-oss"])
    text = slow_truth(model, LONGEST)
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.constant_(parameter, -1e9)
    assert slow_truth(model, LONGEST) != text


def rebuilt(family: Family, **changes: Any) -> Any:
    model = family.build(family.config(**changes)).to(torch.float64).eval()
    model.set_attn_implementation("eager")
    model.set_experts_implementation("eager")
    return model
