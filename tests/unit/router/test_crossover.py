"""Which prompts are handed over follows from the cost alone."""

import pytest

from bench.crossover import NUM_TOKENS, crossover_tokens, saved_share


@pytest.mark.parametrize("num_streams", [1, 4, 16])
@pytest.mark.parametrize("cached_share", [0.0, 0.5, 0.9])
def test_the_longer_a_prompt_the_better_its_hand_over(
    num_streams: int, cached_share: float
) -> None:
    signs = [saved_share(n, cached_share, num_streams) > 0 for n in NUM_TOKENS]
    assert signs == sorted(signs)


def test_busy_decode_workers_hand_over_shorter_prompts() -> None:
    borders = [crossover_tokens(0.25, num_streams) for num_streams in (1, 2, 4, 16)]
    assert borders == sorted(borders, key=lambda border: -(border or 0))
    assert borders[0] != borders[-1]


def test_what_is_mostly_cached_where_it_decodes_stays_there() -> None:
    assert crossover_tokens(0.0, 4) is not None
    assert crossover_tokens(0.99, 4) is None


def test_an_idle_decode_worker_keeps_every_prompt() -> None:
    assert crossover_tokens(0.0, 0) is None
