"""Sampling that asks nothing gives the tokens of sampling that may."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.paged.sampling import needs_no_tokens, sample_queued, sampling_columns
from engine.sampling.params import SamplingParams
from engine.sampling.rows import SamplingRow
from engine.sampling.sampler import sample
from tests.unit.engine.conftest import make_request

params = st.builds(
    SamplingParams,
    max_tokens=st.just(9),
    temperature=st.sampled_from([0.0, 1e-6, 0.3, 1.0, 2.0]),
    top_k=st.sampled_from([0, 0, 1, 5, 256]),
    top_p=st.sampled_from([1.0, 1.0, 0.9, 0.2]),
    min_p=st.sampled_from([0.0, 0.0, 0.1]),
    seed=st.integers(0, 2**64 - 1),
)
rows_of = st.lists(
    st.builds(SamplingRow, params=params, position=st.integers(1, 999)), min_size=1, max_size=6
)


@settings(max_examples=60, deadline=None)
@given(
    rows=rows_of,
    vocab_size=st.sampled_from([7, 256, 300, 1000]),
    spread=st.sampled_from([0.01, 1.0, 6.0]),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    seed=st.integers(0, 99),
)
def test_the_tokens_are_those_of_the_sampler(
    rows: list[SamplingRow], vocab_size: int, spread: float, dtype: torch.dtype, seed: int
):
    generator = torch.Generator().manual_seed(seed)
    logits = (spread * torch.randn(len(rows), vocab_size, generator=generator)).to(dtype)
    before = logits.clone()
    expected = sample(logits.clone(), rows)
    columns = torch.from_numpy(sampling_columns(rows))
    token_ids, is_usable, is_decided = sample_queued(logits, columns, rows).tolist()
    assert torch.equal(logits, before)
    assert all(is_usable)
    for token_id, decided, wanted in zip(token_ids, is_decided, expected, strict=True):
        assert token_id == wanted or not decided
    few = vocab_size <= 256 or spread == 6.0
    assert all(is_decided) or not few or any(r.params.temperature > 1.0 for r in rows)


def test_logits_that_are_not_finite_are_told():
    rows = [SamplingRow(params=SamplingParams(max_tokens=1, top_p=0.5), position=1)] * 3
    logits = torch.zeros(3, 9)
    logits[1, 4] = float("nan")
    logits[2, 5] = float("inf")
    answer = sample_queued(logits, torch.from_numpy(sampling_columns(rows)), rows)
    assert answer[1].tolist() == [1, 0, 0]


def test_what_depends_on_tokens_is_not_sampled_so():
    assert needs_no_tokens(make_request("r", [1], temperature=1.0, top_p=0.5, top_k=256))
    for changes in (
        {"num_choices": 2},
        {"new_token_mask": object},
        {"presence_penalty": 0.1},
        {"logit_bias": {3: 1.0}},
        {"bad_words": ((3,),)},
        {"allowed_token_ids": (3, 4)},
        {"num_logprobs": 0},
        {"num_prompt_logprobs": 0},
        {"min_tokens": 1},
        {"temperature": 1.0, "top_k": 257},  # more than the likeliest few may come: a whole sort
    ):
        assert not needs_no_tokens(make_request("r", [1], **changes)), changes
