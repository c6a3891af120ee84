"""Sampling: the right distribution, and the same token in whatever batch."""

from collections import Counter
from typing import Any

import pytest
import torch

from engine.sampling.params import SamplingParams
from engine.sampling.random_stream import Purpose, uniform
from engine.sampling.rows import SamplingRow
from engine.sampling.sampler import sample


def row(position: int = 0, banned: tuple[int, ...] = (), **changes: Any) -> SamplingRow:
    params = SamplingParams(max_tokens=8, **changes)
    return SamplingRow(params=params, position=position, banned_token_ids=banned)


def chi_square(counts: Counter[int], probabilities: list[float], total: int) -> float:
    return sum(
        (counts[token] - total * p) ** 2 / (total * p)
        for token, p in enumerate(probabilities)
        if p > 0
    )


def draw(probabilities: list[float], total: int, **changes: Any) -> Counter[int]:
    logits = torch.tensor(probabilities, dtype=torch.float64).log().expand(total, -1)
    tokens = sample(logits, [row(position, seed=7, **changes) for position in range(total)])
    return Counter(token for token in tokens if token is not None)


def test_tokens_follow_the_distribution():
    probabilities = [0.4, 0.3, 0.15, 0.1, 0.05]
    counts = draw(probabilities, 20_000)
    assert chi_square(counts, probabilities, 20_000) < 18.5  # p = 0.001 at 4 degrees


def test_temperature_sharpens():
    probabilities = [0.5, 0.3, 0.2]
    squared = [p * p for p in probabilities]
    expected = [p / sum(squared) for p in squared]
    counts = draw(probabilities, 20_000, temperature=0.5)
    assert chi_square(counts, expected, 20_000) < 13.9  # p = 0.001 at 2 degrees


def test_streams_of_neighbouring_seeds_and_positions_are_independent():
    total = 4096
    pairs = Counter(
        (
            int(4 * uniform(seed=seed, position=position, purpose=Purpose.SAMPLE)),
            int(4 * uniform(seed=seed, position=position + 1, purpose=Purpose.SAMPLE)),
            int(4 * uniform(seed=seed + 1, position=position, purpose=Purpose.SAMPLE)),
        )
        for seed in range(64)
        for position in range(64)
    )
    expected = total / 64
    assert len(pairs) == 64
    assert sum((n - expected) ** 2 / expected for n in pairs.values()) < 103.4  # p = 0.001


def test_every_part_of_the_place_changes_the_number():
    numbers = {
        uniform(seed=1, position=2, purpose=Purpose.SAMPLE),
        uniform(seed=2, position=2, purpose=Purpose.SAMPLE),
        uniform(seed=1, position=3, purpose=Purpose.SAMPLE),
        uniform(seed=1, position=2, purpose=Purpose.DRAFT),
        uniform(seed=1, position=2, purpose=Purpose.SAMPLE, choice_index=1),
        uniform(seed=-1, position=2, purpose=Purpose.SAMPLE),
    }
    assert len(numbers) == 6
    assert all(0.0 <= number < 1.0 for number in numbers)


@pytest.mark.parametrize(
    ("changes", "allowed"),
    [
        ({"top_k": 1}, {0}),
        ({"top_k": 2}, {0, 1}),
        ({"top_p": 0.39}, {0}),
        ({"top_p": 0.41}, {0, 1}),
        ({"top_p": 1e-9}, {0}),
        ({"min_p": 0.5}, {0, 1}),
        ({"min_p": 1.0}, {0}),
        ({"top_k": 3, "top_p": 0.5}, {0, 1}),
        ({"temperature": 1e-6}, {0}),
        ({"temperature": 0.0}, {0}),
    ],
)
def test_filters_leave_out_what_they_should(changes: dict[str, Any], allowed: set[int]):
    counts = draw([0.4, 0.3, 0.15, 0.1, 0.05], 2000, **changes)
    assert set(counts) == allowed


def test_a_row_samples_the_same_in_every_batch():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(8, 320, dtype=torch.float64, generator=generator) * 3
    rows = [
        row(5, seed=1),
        row(6, temperature=0.0),
        row(7, seed=2, top_k=10),
        row(8, seed=3, top_p=0.9, temperature=1.3),
        row(9, seed=4, min_p=0.1),
        row(10, seed=5, top_k=50, top_p=0.8, min_p=0.01),
        row(11, seed=6, banned=(1, 2, 3)),
        row(12, seed=7, temperature=2.0),
    ]
    alone = [sample(logits[n : n + 1], [rows[n]])[0] for n in range(8)]
    assert sample(logits, rows) == alone
    order = [6, 2, 4]
    assert sample(logits[order], [rows[n] for n in order]) == [alone[n] for n in order]


def test_banned_tokens_are_not_sampled_and_neighbours_keep_theirs():
    logits = torch.tensor([[9.0, 1.0, 0.0], [9.0, 1.0, 0.0]])
    rows = [row(temperature=0.0, banned=(0,)), row(temperature=0.0)]
    assert sample(logits, rows) == [1, 0]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_fails_alone(bad: float):
    logits = torch.randn(3, 10)
    logits[1, 4] = bad
    tokens = sample(logits, [row(), row(), row()])
    assert tokens[1] is None
    assert tokens[0] is not None
    assert tokens[2] is not None


def test_half_precision_logits_are_sampled_too():
    logits = torch.tensor([[0.0, 8.0, 1.0]], dtype=torch.bfloat16)
    assert sample(logits, [row(temperature=0.0)]) == [1]


@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_p": float("nan")},
        {"min_p": -0.1},
        {"top_k": -1},
        {"min_tokens": -1},
    ],
)
def test_params_without_meaning_are_refused(changes: dict[str, Any]):
    with pytest.raises(ValueError, match="expected"):
        row(**changes)
