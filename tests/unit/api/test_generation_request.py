"""The table of verdicts on parameters: the one that HTTP and gRPC share."""

import math

import pytest

from api.errors import ApiError, Verdict
from api.generation_request import Limits, read_model, validate

LIMITS = Limits(
    max_model_len=64,
    vocab_size=320,
    encode_word=lambda text: [3 + ord(letter) % 300 for letter in text],
    max_num_seqs=16,
    eos_token_ids=(2, 5),
)
PROMPT = list(range(8))
MAX_INT64 = 2**63 - 1


def verdict(values: dict[str, object]) -> ApiError:
    with pytest.raises(ApiError) as caught:
        validate(values, token_ids=PROMPT, limits=LIMITS)
    return caught.value


REFUSED: list[tuple[str, object]] = [
    *(("temperature", value) for value in (-0.1, 2.1, math.nan, math.inf, "1", True, [], {})),
    *(("top_p", value) for value in (0, -1, 1.1, math.nan, "1", True)),
    *(("min_p", value) for value in (-0.1, 1.1, math.nan, "0")),
    *(("top_k", value) for value in (-2, 1.5, "1", True, 2**31)),
    *(("seed", value) for value in (2**63, -(2**63) - 1, 1.5, "7", True, 1e300)),
    *(("max_tokens", value) for value in (0, -1, "5", 1.5, True, 2**64, 2.0**64)),
    *(("max_completion_tokens", value) for value in (0, -1, "5", True)),
    *(("min_tokens", value) for value in (-1, "1", True, 57, 100)),
    *(("stop", value) for value in ("", [""], ["", "x"], [], ["a"] * 5, [1], 5, {}, "x" * 257)),
    *(
        ("stop_token_ids", value)
        for value in ([320], [-1], [1.0], [True], ["1"], 5, "1", [1] * 129)
    ),
    *(("ignore_eos", value) for value in (1, "true", [])),
    *(("priority", value) for value in (-(2**31) - 1, 2**31, 0.5, "1", True)),
    *(
        ("repetition_penalty", value)
        for value in (0, -1, 1e-40, 101, math.nan, math.inf, "1", True)
    ),
    *(
        (name, value)
        for name in ("presence_penalty", "frequency_penalty")
        for value in (-2.1, 2.1, math.nan, -math.inf, "0", True)
    ),
    # A13: an id or a number outside of what there is never reaches a tensor.
    *(
        ("logit_bias", value)
        for value in (
            {"999999": 5},
            {"320": 5},
            {"-1": 5},
            {"abc": 5},
            {"1.0": 5},
            {"": 5},
            {"9" * 400: 5},
            {"1": 1000},
            {"1": -100.1},
            {"1": math.nan},
            {"1": "5"},
            {"1": True},
            {"1": None},
            {str(n): 1 for n in range(1025)},
            [1],
            5,
        )
    ),
    *(
        ("bad_words", value)
        for value in ("x", [""], ["  "], [1], [None], ["x"] * 129, ["x" * 129], {}, 5)
    ),
    *(
        ("allowed_token_ids", value)
        for value in ([], [320], [-1], [True], [1.0], ["1"], 5, [1] * 321)
    ),
    *(
        (name, value)
        for name in ("logprobs", "prompt_logprobs")
        for value in (-1, 21, 1.5, "1", True)
    ),
    *(
        (name, value)
        for name in ("include_stop_str_in_output", "echo", "return_token_ids")
        for value in (1, "true", [])
    ),
    *(("cache_salt", value) for value in ("", "a\0b", "x" * 129, 5, True)),
    *(("prompt_cache_key", value) for value in (5, True, ["a"], "x" * 513)),
]


@pytest.mark.parametrize(("name", "value"), REFUSED, ids=repr)
def test_a_bad_value_is_a_400_that_names_the_field(name: str, value: object) -> None:
    error = verdict({name: value})
    assert error.face.http_status == 400
    assert error.param == name
    assert name in error.message
    assert len(error.message) <= 512


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", 0),
        ("temperature", 2),
        ("top_p", 1),
        ("top_p", 1e-9),
        ("top_k", -1),
        ("top_k", 0),
        ("seed", MAX_INT64),
        ("seed", -(2**63)),
        ("seed", -1),
        ("max_tokens", 56),
        ("min_tokens", 56),
        ("stop", "\0"),
        ("stop", ["a", "b", "c", "d"]),
        ("stop_token_ids", [0, 319]),
        ("stop_token_ids", []),
        ("cache_salt", "🦊"),
        ("priority", -(2**31)),
        ("priority", 2**31 - 1),
        ("repetition_penalty", 0.01),
        ("repetition_penalty", 100),
        ("presence_penalty", -2),
        ("frequency_penalty", 2),
        ("logit_bias", {}),
        ("logit_bias", {"0": -100, "319": 100}),
        ("bad_words", []),
        ("allowed_token_ids", [0, 319]),
        ("logprobs", 0),
        ("logprobs", 20),
        ("prompt_logprobs", 20),
        ("prompt_cache_key", ""),
        ("prompt_cache_key", "🦊" * 512),
    ],
    ids=repr,
)
def test_a_value_at_the_border_is_taken(name: str, value: object) -> None:
    validate({name: value}, token_ids=PROMPT, limits=LIMITS)


def test_null_is_the_same_as_absent() -> None:
    names = {name for name, _ in REFUSED}
    for values in [*({name: None} for name in names), dict.fromkeys(names)]:
        request = validate({**values, "seed": 1}, token_ids=PROMPT, limits=LIMITS)
        assert request == validate({"seed": 1}, token_ids=PROMPT, limits=LIMITS)


def test_defaults() -> None:
    request = validate({}, token_ids=PROMPT, limits=LIMITS)
    assert (request.temperature, request.top_p, request.top_k, request.min_p) == (1.0, 1.0, 0, 0.0)
    assert request.max_tokens == 56
    assert 0 <= request.seed <= MAX_INT64


def test_top_k_minus_one_means_off() -> None:
    assert validate({"top_k": -1}, token_ids=PROMPT, limits=LIMITS).top_k == 0


def test_each_request_without_a_seed_gets_its_own() -> None:
    seeds = {validate({}, token_ids=PROMPT, limits=LIMITS).seed for _ in range(4)}
    assert len(seeds) == 4


@pytest.mark.parametrize("temperature", [0, 1e-40, 1e-6])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    request = validate({"temperature": temperature}, token_ids=PROMPT, limits=LIMITS)
    assert request.temperature == 0.0


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_too_long_a_request_is_told_the_true_numbers(name: str) -> None:
    error = verdict({name: 60})
    assert error.verdict is Verdict.CONTEXT_LENGTH
    assert error.param == name
    for number in ("64", "68", "8", "60"):
        assert number in error.message


def test_a_prompt_that_fills_the_context_is_refused_with_its_length() -> None:
    with pytest.raises(ApiError) as caught:
        validate({}, token_ids=[1] * 64, limits=LIMITS)
    assert "the prompt has 64" in caught.value.message


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(ApiError, match="empty"):
        validate({}, token_ids=[], limits=LIMITS)


def test_a_default_never_exceeds_the_context() -> None:
    request = validate({}, token_ids=[1] * 60, limits=LIMITS, default_max_tokens=16)
    assert request.max_tokens == 4


def test_both_names_of_max_tokens_must_agree() -> None:
    assert verdict({"max_tokens": 3, "max_completion_tokens": 4}).face.http_status == 400
    both = {"max_tokens": 3, "max_completion_tokens": 3}
    assert validate(both, token_ids=PROMPT, limits=LIMITS).max_tokens == 3


def test_min_tokens_above_max_tokens_is_refused() -> None:
    assert verdict({"min_tokens": 11, "max_tokens": 10}).param == "min_tokens"


@pytest.mark.parametrize(
    ("model", "status"),
    [("nope", 404), ("tiny\n", 404), ("x" * 100_000, 404), ("", 400), (None, 400), (5, 400)],
)
def test_a_wrong_model_is_404_and_a_missing_one_400(model: object, status: int) -> None:
    with pytest.raises(ApiError) as caught:
        read_model({"model": model}, served_model="tiny")
    assert caught.value.face.http_status == status
    assert len(caught.value.message) < 256


def test_sampling_params_carry_every_number() -> None:
    values: dict[str, object] = {
        "temperature": 0.5,
        "top_k": 5,
        "top_p": 0.5,
        "min_p": 0.25,
        "seed": -3,
        "max_tokens": 9,
        "min_tokens": 2,
        "stop_token_ids": [7],
        "ignore_eos": True,
    }
    params = validate(values, token_ids=PROMPT, limits=LIMITS).to_sampling_params()
    assert {name: getattr(params, name) for name in values if name != "stop_token_ids"} == {
        name: value for name, value in values.items() if name != "stop_token_ids"
    }
    assert list(params.stop_token_ids) == [7]


def test_sampling_params_carry_what_is_said_of_tokens() -> None:
    values: dict[str, object] = {
        "repetition_penalty": 1.5,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "logit_bias": {"5": 2, "7": -100},
        "bad_words": ["ab"],
        "allowed_token_ids": [5, 7, 9],
        "logprobs": 2,
        "prompt_logprobs": 3,
    }
    params = validate(values, token_ids=PROMPT, limits=LIMITS).to_sampling_params()
    penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
    assert penalties == (1.5, 0.5, -0.5)
    assert dict(params.logit_bias) == {5: 2.0, 7: -100.0}
    assert list(params.allowed_token_ids) == [5, 7, 9]
    assert (params.num_logprobs, params.num_prompt_logprobs) == (2, 3)
    # As it stands alone, and as it stands after a space.
    assert [list(word.token_ids) for word in params.bad_words] == [[100, 101], [35, 100, 101]]


def test_logprobs_are_off_by_default() -> None:
    params = validate({}, token_ids=PROMPT, limits=LIMITS).to_sampling_params()
    assert not params.HasField("num_logprobs")
    assert not params.HasField("num_prompt_logprobs")


def test_an_echo_with_logprobs_needs_those_of_the_prompt() -> None:
    request = validate({"echo": True, "logprobs": 2}, token_ids=PROMPT, limits=LIMITS)
    assert request.to_sampling_params().num_prompt_logprobs == 2
    assert request.num_prompt_logprobs is None


@pytest.mark.parametrize(
    "values",
    [
        {"allowed_token_ids": [9], "stop_token_ids": [9], "min_tokens": 1},
        {"allowed_token_ids": [100], "bad_words": ["a"]},
        {"allowed_token_ids": [100, 9], "bad_words": ["a"], "stop_token_ids": [9], "min_tokens": 1},
        {"allowed_token_ids": [2], "min_tokens": 1},  # nothing but ends of text
        {"allowed_token_ids": [5, 9, 2], "stop_token_ids": [9], "min_tokens": 1},
        {"allowed_token_ids": [2, 100], "bad_words": ["a"], "min_tokens": 1},
    ],
)
def test_allowed_tokens_that_others_forbid_are_refused(values: dict[str, object]) -> None:
    assert verdict(values).param == "allowed_token_ids"


def test_allowed_tokens_may_overlap_with_forbidden_ones() -> None:
    for values in (
        {"allowed_token_ids": [100, 9], "bad_words": ["a", "bc"], "stop_token_ids": [9]},
        {"allowed_token_ids": [2, 5]},  # the text ends at once, as was asked for
        {"allowed_token_ids": [2], "min_tokens": 3, "ignore_eos": True},
    ):
        validate(values, token_ids=PROMPT, limits=LIMITS)


@pytest.mark.parametrize(
    ("values", "param"),
    [
        ({"n": 0}, "n"),
        ({"n": -1}, "n"),
        ({"n": 1.5}, "n"),
        ({"n": True}, "n"),
        ({"n": 17}, "n"),  # more than can run together
        ({"n": 2147483647}, "n"),
        ({"best_of": 1_000_000}, "best_of"),
        ({"best_of": 17}, "best_of"),
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"best_of": 0}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
    ],
    ids=str,
)
def test_bad_numbers_of_choices_are_named(values: dict[str, object], param: str) -> None:
    assert verdict(values).param == param


def test_choices_are_read() -> None:
    def choices(**values: object) -> tuple[int, int]:
        request = validate(values, token_ids=PROMPT, limits=LIMITS)
        return request.num_shown_choices, request.num_choices

    assert choices() == choices(n=None, best_of=None) == (1, 1)
    assert choices(n=16, stream=True) == (16, 16)
    assert choices(best_of=4) == (1, 4)
    assert choices(n=2, best_of=2, stream=True) == (2, 2)


def test_ranked_choices_have_their_logprobs_computed() -> None:
    ranked = validate({"best_of": 2}, token_ids=PROMPT, limits=LIMITS)
    assert ranked.num_logprobs is None
    assert ranked.to_sampling_params().num_logprobs == 0
    assert ranked.to_sampling_params().HasField("num_logprobs")
    plain = validate({"n": 2}, token_ids=PROMPT, limits=LIMITS)
    assert not plain.to_sampling_params().HasField("num_logprobs")
