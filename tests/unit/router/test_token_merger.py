import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.logprobs import TokenLogprobs
from router.request import FinishReason
from router.token_merger import TokenGapError, TokenMerger, TokenPiece


def test_repeats_are_dropped() -> None:
    merger = TokenMerger(3)
    assert merger.add(TokenPiece(3, [7]), may_wait=False) == [7]
    assert merger.add(TokenPiece(3, [7, 8]), may_wait=False) == [8]
    assert merger.add(TokenPiece(3, [7]), may_wait=False) == []
    assert merger.output == [7, 8]


def test_a_gap_fails_when_nobody_can_fill_it() -> None:
    merger = TokenMerger(3)
    with pytest.raises(TokenGapError):
        merger.add(TokenPiece(4, [8]), may_wait=False)


def test_early_tokens_wait_for_the_first() -> None:
    merger = TokenMerger(3)
    assert merger.add(TokenPiece(4, [8]), may_wait=True) == []
    assert merger.add(TokenPiece(5, [9]), may_wait=True) == []
    assert merger.has_early
    assert merger.add(TokenPiece(3, [7]), may_wait=False) == [7, 8, 9]
    assert not merger.has_early
    merger.close_gap()


def test_early_tokens_without_the_first_are_a_gap() -> None:
    merger = TokenMerger(3)
    merger.add(TokenPiece(4, [8]), may_wait=True)
    with pytest.raises(TokenGapError):
        merger.close_gap()
    merger.start_attempt()
    merger.close_gap()


def test_a_different_repeat_is_an_error() -> None:
    merger = TokenMerger(3)
    merger.add(TokenPiece(3, [7]), may_wait=False)
    with pytest.raises(TokenGapError):
        merger.add(TokenPiece(3, [6]), may_wait=False)


def test_a_position_inside_the_prompt_is_an_error() -> None:
    with pytest.raises(TokenGapError):
        TokenMerger(3).add(TokenPiece(2, [1]), may_wait=False)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 6)), max_size=20))
def test_any_overlapping_messages_give_the_output_once(messages: list[tuple[int, int]]) -> None:
    truth = list(range(100, 300))
    merger = TokenMerger(5)
    got: list[int] = []
    for num_repeated, length in messages:
        start = max(len(got) - num_repeated, 0)
        got += merger.add(TokenPiece(5 + start, truth[start : start + length]), may_wait=False)
        assert got == truth[: len(got)] == merger.output


def test_a_finish_behind_a_gap_waits_for_the_gap() -> None:
    merger = TokenMerger(3, choice_index=1)
    merger.add(TokenPiece(4, [8]), may_wait=True)
    merger.finish_reason = FinishReason.STOP
    assert not merger.is_finished
    assert merger.add(TokenPiece(3, [7]), may_wait=False) == [7, 8]
    assert merger.is_finished
    assert merger.newest(0, FinishReason.STOP).choice_index == 1


def test_a_finish_behind_a_gap_is_forgotten_with_its_attempt() -> None:
    merger = TokenMerger(3)
    merger.add(TokenPiece(4, [8]), may_wait=True)
    merger.finish_reason = FinishReason.STOP
    merger.start_attempt()
    assert merger.finish_reason is None
    assert not merger.is_over


def entries(token_ids: list[int]) -> list[TokenLogprobs]:
    return [TokenLogprobs(-token_id / 10, 1, ()) for token_id in token_ids]


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 6)), max_size=20))
def test_logprobs_go_with_their_tokens_once(messages: list[tuple[int, int]]) -> None:
    truth = list(range(100, 300))
    merger = TokenMerger(5, has_logprobs=True)
    got: list[TokenLogprobs] = []
    for num_repeated, length in messages:
        start = max(len(merger.output) - num_repeated, 0)
        part = truth[start : start + length]
        added = merger.add(TokenPiece(5 + start, part, entries(part)), may_wait=False)
        batch = merger.newest(len(added), None)
        assert batch.token_ids == added
        got += batch.logprobs
    assert got == entries(merger.output)


def test_a_token_without_its_logprobs_is_an_error() -> None:
    merger = TokenMerger(3, has_logprobs=True)
    with pytest.raises(TokenGapError, match="without"):
        merger.add(TokenPiece(3, [7]), may_wait=False)


def test_the_first_token_waits_for_the_prompt_s_logprobs() -> None:
    """The decode worker may be quicker than the last word of the prefill worker."""
    merger = TokenMerger(4, has_prompt_logprobs=True)
    merger.add_prompt_logprobs(1, entries([1, 2]))
    assert merger.add(TokenPiece(4, [7]), may_wait=True) == []
    assert merger.lacks_prompt_logprobs
    merger.add_prompt_logprobs(3, entries([3]))
    assert merger.add(TokenPiece(4, [7]), may_wait=False) == [7]
    assert not merger.has_early or merger.add(TokenPiece(5, [8]), may_wait=False)
    assert merger.newest(len(merger.output), None).prompt_logprobs == entries([1, 2, 3])
    merger.add(TokenPiece(5, [8]), may_wait=False)
    assert merger.newest(1, None).prompt_logprobs == []


def test_a_worker_that_starts_again_repeats_the_prompt_s_logprobs() -> None:
    merger = TokenMerger(4, has_prompt_logprobs=True)
    merger.add_prompt_logprobs(1, entries([1, 2]))
    merger.start_attempt()
    merger.add_prompt_logprobs(1, entries([1]))
    merger.add_prompt_logprobs(2, entries([2, 3]))
    assert merger.prompt_logprobs == entries([1, 2, 3])
    assert not merger.lacks_prompt_logprobs


@pytest.mark.parametrize(("start", "count"), [(2, 1), (0, 1), (1, 4)])
def test_prompt_logprobs_with_a_hole_are_an_error(start: int, count: int) -> None:
    merger = TokenMerger(4, has_prompt_logprobs=True)
    with pytest.raises(TokenGapError):
        merger.add_prompt_logprobs(start, entries([1] * count))
