"""Each stage against transformers, or against a slow loop that says what it means."""

import math
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from engine.sampling.bans import ban, completed_by
from engine.sampling.bias import LogitBias
from engine.sampling.candidates import draw_among_likeliest, may_decide
from engine.sampling.draw import draw
from engine.sampling.filters import hide_unlikely
from engine.sampling.logprobs import token_logprobs
from engine.sampling.masks import mask_of
from engine.sampling.params import SamplingParams
from engine.sampling.penalties import TokenCounts, penalise
from engine.sampling.rows import SamplingRow
from engine.sampling.sampler import adjust, sample

VOCAB = 40
CPU = torch.device("cpu")


def random_logits(rows: int, vocab: int = VOCAB, *, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 3 * torch.randn(rows, vocab, dtype=torch.float64, generator=generator)


def params_of(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 8, **changes})


TOKENS = st.lists(st.integers(0, VOCAB - 1), max_size=80)


@settings(max_examples=60, deadline=None)
@given(prompt=TOKENS, output=TOKENS, cut=st.integers(0, 80), seed=st.integers(0, 9))
def test_penalties_mean_what_they_say(
    prompt: list[int], output: list[int], cut: int, seed: int
) -> None:
    """However the counts came together: step by step, or at once as after a migration."""
    params = params_of(repetition_penalty=1.7, presence_penalty=0.5, frequency_penalty=-0.25)
    logits = random_logits(1, seed=seed)
    tokens = prompt + output
    expected = logits.clone()
    if tokens:
        expected = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([tokens]), expected)
    for token_id, count in Counter(output).items():
        expected[0, token_id] -= 0.5 - 0.25 * count
    counts = TokenCounts(params, prompt)
    for end in range(len(prompt) + min(cut, len(output)), len(tokens) + 1):
        counts.update(tokens[:end])
    penalise(logits, {0: counts})
    torch.testing.assert_close(logits, expected, rtol=1e-12, atol=1e-12)


@settings(max_examples=60, deadline=None)
@given(
    words=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3), min_size=1, max_size=4),
    output=st.lists(st.integers(0, 3), max_size=6),
)
def test_bad_words_are_banned_as_transformers_does(
    words: list[list[int]], output: list[int]
) -> None:
    logits = random_logits(1)
    processor = NoBadWordsLogitsProcessor(words, eos_token_id=[VOCAB - 1])
    # transformers looks at a prompt too; these tokens are in no word.
    expected = processor(torch.tensor([[9, 9, 9, *output]]), logits.clone())
    banned = completed_by([tuple(word) for word in words], output)
    if banned:
        ban(logits, {0: banned})
    assert torch.equal(logits, expected)


def test_a_bad_word_is_not_completed_across_the_start_of_the_output() -> None:
    assert completed_by([(7, 8)], []) == []
    assert completed_by([(7, 8)], [7]) == [8]
    assert completed_by([(8,), (5, 7, 8)], [7]) == [8]


def test_bans_that_leave_nothing_yield() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0], [1.0, 2.0, 3.0]])
    rows = [
        SamplingRow(
            params=params_of(temperature=0.0),
            position=0,
            token_mask=mask_of([1], 3, CPU),
            banned_token_ids=banned,
        )
        for banned in ((1,), (0,))
    ]
    assert sample(logits, rows) == [1, 1]


def test_a18_a_greedy_row_with_a_bias_is_the_same_beside_a_sampled_one() -> None:
    logits = random_logits(2)
    best = int(logits[0].argmax())
    greedy = SamplingRow(
        params=params_of(temperature=0.0),
        position=5,
        bias=LogitBias({best: -100.0}),
        banned_token_ids=(3,),
    )
    sampled = SamplingRow(params=params_of(temperature=1.0), position=5)
    alone = sample(logits[:1], [greedy])
    assert sample(logits, [greedy, sampled])[:1] == alone
    assert alone != [best]


def test_a_bias_of_100_forces_and_of_minus_100_forbids() -> None:
    logits = random_logits(50)
    forced = SamplingRow(params=params_of(), position=0, bias=LogitBias({7: 100.0}))
    assert set(sample(logits, [forced] * 50)) == {7}
    likely = {int(i) for i in logits.argmax(dim=-1)}
    forbidding = LogitBias(dict.fromkeys(likely, -100.0))
    rows = [SamplingRow(params=params_of(), position=n, bias=forbidding) for n in range(50)]
    assert not likely & set(sample(logits, rows))


def test_only_allowed_tokens_come() -> None:
    mask = mask_of([3, 9], VOCAB, CPU)
    rows = [SamplingRow(params=params_of(), position=n, token_mask=mask) for n in range(200)]
    assert set(sample(random_logits(1).expand(200, -1), rows)) == {3, 9}


def test_nothing_wanted_is_nothing_done() -> None:
    logits = random_logits(3)
    rows = [SamplingRow(params=params_of(), position=0) for _ in range(3)]
    assert adjust(logits, rows) is logits


FILTERS: list[dict[str, Any]] = [
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 300},
    {"top_k": 10_000},
    {"top_p": 0.3},
    {"top_p": 0.9},
    {"top_p": 0.9999},
    {"top_p": 1e-9},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"top_k": 50, "top_p": 0.8, "min_p": 0.01},
    {"top_k": 300, "top_p": 0.95},
    {},
]


@pytest.mark.parametrize("vocab", [10, 256, 1000])
def test_filters_leave_what_transformers_leaves(vocab: int) -> None:
    """All of them in one batch, so that none depends on what its neighbours want."""
    logits = random_logits(len(FILTERS), vocab, seed=vocab)
    logits[:, 3] = float("-inf")  # banned before
    kept = hide_unlikely(logits, [params_of(**changes) for changes in FILTERS])
    for row, changes in enumerate(FILTERS):
        expected = logits[row : row + 1]
        if top_k := changes.get("top_k"):
            expected = TopKLogitsWarper(min(top_k, vocab))(None, expected)
        if top_p := changes.get("top_p"):
            expected = TopPLogitsWarper(top_p)(None, expected)
        if min_p := changes.get("min_p"):
            expected = MinPLogitsWarper(min_p)(None, expected)
        assert torch.equal(kept[row], expected[0]), (vocab, changes)


@pytest.mark.parametrize("vocab", [10, 256, 1000])
def test_the_likeliest_tokens_decide_as_all_of_them_would(vocab: int) -> None:
    params = [params_of(temperature=0.7, **changes) for changes in FILTERS]
    params = [each for each in params if may_decide(each)]
    logits = 2 * random_logits(len(params), vocab, seed=vocab)
    logits[:, 3] = float("-inf")
    num_decided = 0
    for number in (0.0, 0.1, 0.5, 0.9, 0.999999):
        numbers = [number] * len(params)
        expected = draw(hide_unlikely(logits / 0.7, params), numbers)
        got, is_decided = draw_among_likeliest(logits, params, numbers)
        assert torch.equal(got[is_decided], expected[is_decided])
        num_decided += int(is_decided.sum())
    assert num_decided >= 5 * 6


def test_a_row_that_its_likeliest_tokens_do_not_decide_looks_at_all() -> None:
    """Flat logits: 90 % of them are far more than the candidates."""
    rows = [SamplingRow(params=params_of(top_p=0.9, seed=n), position=n) for n in range(2000)]
    tokens = sample(0.001 * random_logits(1, 1000).expand(2000, -1), rows)
    assert len({token for token in tokens if token is not None}) > 600


@pytest.mark.parametrize("temperature", [0.0, 1e-40, 1e-6, 1e-5, 1e-4, 1e-3])
def test_a16_a_tiny_temperature_is_greedy_and_never_nan(temperature: float) -> None:
    logits = random_logits(20).float() * 30
    rows = [SamplingRow(params=params_of(temperature=temperature), position=n) for n in range(20)]
    assert sample(logits, rows) == logits.argmax(dim=-1).tolist()


def test_logprobs_are_those_of_the_model() -> None:
    logits = random_logits(3)
    truth = logits.log_softmax(dim=-1)
    entries = token_logprobs(logits, [4, 5, 6], [0, 2, VOCAB])
    for row, (token_id, entry) in enumerate(zip((4, 5, 6), entries, strict=True)):
        assert math.isclose(entry.logprob, truth[row, token_id], rel_tol=1e-12)
        assert entry.rank == 1 + sum(truth[row] > truth[row, token_id])
        order = truth[row].argsort(descending=True).tolist()
        assert [token for token, _ in entry.top] == order[: (0, 2, VOCAB)[row]]
        assert all(math.isclose(truth[row, i], value, rel_tol=1e-12) for i, value in entry.top)


def test_logprobs_of_a_row_are_alike_alone_and_in_a_batch_for_one_thread_and_two() -> None:
    logits = random_logits(100, 49152).float()
    token_ids, num_top = list(range(100)), [1] * 100
    num_threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        together = token_logprobs(logits, token_ids, num_top)
        torch.set_num_threads(2)
        alone = [token_logprobs(logits[n : n + 1], [n], [1])[0] for n in token_ids]
    finally:
        torch.set_num_threads(num_threads)
    assert alone == together


def test_the_distribution_behind_all_stages_is_exact() -> None:
    """Chi-square of 50,000 draws against probabilities computed the slow way."""
    total = 50_000
    logits = random_logits(1, 12, seed=4)
    changes: dict[str, Any] = {"temperature": 0.8, "top_k": 9, "top_p": 0.97, "seed": 11}
    params = params_of(repetition_penalty=1.3, frequency_penalty=0.2, **changes)
    prompt, output = [1, 2], [3, 3, 4]
    expected = logits.clone()
    expected[0, 5] = float("-inf")
    expected[0, 6] += 1.5
    expected = RepetitionPenaltyLogitsProcessor(1.3)(torch.tensor([prompt + output]), expected)
    expected[0, 3] -= 0.4
    expected[0, 4] -= 0.2
    expected = TopPLogitsWarper(0.97)(None, TopKLogitsWarper(9)(None, expected / 0.8))
    probabilities = expected.softmax(dim=-1)[0].tolist()
    counts = TokenCounts(params, prompt).update(prompt + output)
    bias = LogitBias({6: 1.5})
    rows = [
        SamplingRow(
            params=params,
            position=position,
            banned_token_ids=(5,),
            bias=bias,
            token_counts=counts,
        )
        for position in range(total)
    ]
    drawn = Counter(sample(logits.expand(total, -1), rows))
    possible = [token for token, p in enumerate(probabilities) if p > 0]
    assert set(drawn) == set(possible)
    chi = sum((drawn[i] - total * p) ** 2 / (total * p) for i, p in enumerate(probabilities) if p)
    assert len(possible) == 6
    assert chi < 20.5  # p = 0.001 at 5 degrees
