"""The one typed request behind HTTP and gRPC, and the one place where it is judged."""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from relevo.v1 import common_pb2

from api.choice_parameters import read_choices
from api.echo import Echo
from api.errors import ApiError, Verdict, invalid, show
from api.logprobs_parameters import read_logprobs, read_prompt_logprobs
from api.parameter_checks import (
    MAX_INT32,
    Values,
    read_flag,
    read_integer,
    read_number,
    read_stops,
    read_text,
)
from api.parsers.reading import Reading
from api.structured_output import StructuredOutput, read_structured_output
from api.token_parameters import (
    EncodeWord,
    check_something_is_left,
    read_allowed_token_ids,
    read_bad_words,
    read_logit_bias,
    read_stop_token_ids,
)
from rpc.grammar_message import to_proto

MAX_SEED = 2**63 - 1
MAX_CACHE_SALT_CHARACTERS = 128
MAX_CACHE_KEY_CHARACTERS = 512
GREEDY_BELOW = 1e-5
# Far beyond what is of use, and far from what would overflow a logit.
MAX_REPETITION_PENALTY = 100.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the served model allows, and how it spells a word."""

    max_model_len: int  # prompt and completion together
    vocab_size: int
    encode_word: EncodeWord
    max_num_seqs: int  # choices that can run together
    eos_token_ids: tuple[int, ...]  # what ends a text unless ignore_eos


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One prompt and how to continue it. Invariant: `validate` made it, all is in range."""

    token_ids: Sequence[int]
    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    bad_words: tuple[tuple[int, ...], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()  # empty: all
    seed: int = 0
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    has_stop_in_text: bool = False
    num_logprobs: int | None = None  # candidates beside each output token; None: no logprobs
    num_prompt_logprobs: int | None = None  # the same for the prompt, as the client asked for it
    num_choices: int = 1  # to generate
    num_shown_choices: int = 1  # the best of them
    has_echo: bool = False  # the prompt stands before the text
    has_token_ids: bool = False
    echo: Echo | None = None  # the prompt laid out, once a face has done it
    cache_salt: str = ""
    priority: int = 0  # lower is served earlier, and may preempt what is higher
    prompt_cache_key: str = ""  # a hint: requests with the same one share a prefix
    structured_output: StructuredOutput | None = None  # what the text must match
    messages: Sequence[Mapping[str, object]] = ()  # the chat it was made of, if it was one
    reading: Reading | None = None  # how thoughts and calls are found in the text; None: not at all

    @property
    def num_computed_prompt_logprobs(self) -> int | None:
        """Candidates an engine must tell for the prompt; an echo shows those of the output."""
        echoed = self.num_logprobs if self.has_echo else None
        wanted = [num for num in (echoed, self.num_prompt_logprobs) if num is not None]
        return max(wanted, default=None)

    @property
    def num_computed_logprobs(self) -> int | None:
        """Candidates an engine must tell for the output; choices are ranked by theirs, too."""
        is_ranked = self.num_choices > self.num_shown_choices
        return 0 if self.num_logprobs is None and is_ranked else self.num_logprobs

    def to_sampling_params(self) -> common_pb2.SamplingParams:
        """Return what an engine needs of it: everything but the text."""
        wanted = self.structured_output
        return common_pb2.SamplingParams(
            grammar=None if wanted is None else to_proto(wanted.grammar),
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            seed=self.seed,
            max_tokens=self.max_tokens,
            min_tokens=self.min_tokens,
            stop_token_ids=self.stop_token_ids,
            ignore_eos=self.ignore_eos,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=self.logit_bias,
            bad_words=[common_pb2.TokenSequence(token_ids=word) for word in self.bad_words],
            allowed_token_ids=self.allowed_token_ids,
            num_logprobs=self.num_computed_logprobs,
            num_prompt_logprobs=self.num_computed_prompt_logprobs,
        )


def read_model(values: Values, *, served_model: str) -> str:
    """Judge the model's name alone: a missing one is 400, a wrong one 404."""
    model = values.get("model")
    if model is None or model == "":
        raise invalid("model is required", "model")
    if not isinstance(model, str):
        raise invalid(f"model must be a string, got {show(model)}", "model")
    if model != served_model:
        raise ApiError(
            Verdict.MODEL_NOT_FOUND, f"The model {show(model)} does not exist", param="model"
        )
    return model


def validate(
    values: Values,
    *,
    token_ids: Sequence[int],
    limits: Limits,
    default_max_tokens: int | None = None,
    prompt_name: str = "prompt",
) -> GenerationRequest:
    """Judge all parameters and the prompt; ApiError names the field and the true numbers.

    Without max_tokens the completion gets `default_max_tokens`, or all that the context leaves.
    """
    if not token_ids:
        raise invalid(f"{prompt_name} is empty; give at least one token", prompt_name)
    token_ids = _truncated(values, token_ids, limits.max_model_len)
    left = _tokens_left(len(token_ids), limits.max_model_len, prompt_name)
    max_tokens = _read_max_tokens(values, limits.max_model_len, left)
    if max_tokens is None:
        max_tokens = left if default_max_tokens is None else min(default_max_tokens, left)
    temperature = _read_temperature(values)
    seed = _read_seed(values)
    min_tokens = _read_min_tokens(values, max_tokens)
    stop_token_ids = read_stop_token_ids(values, limits.vocab_size)
    bad_words = read_bad_words(values, limits.encode_word)
    allowed = read_allowed_token_ids(values, limits.vocab_size)
    num_shown_choices, num_choices = read_choices(values, limits.max_num_seqs)
    ignores_eos = read_flag(values, "ignore_eos")
    ends = stop_token_ids + (() if ignores_eos else limits.eos_token_ids)
    check_something_is_left(allowed, bad_words, ends if min_tokens else ())
    return GenerationRequest(
        token_ids=token_ids,
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=max(0, read_integer(values, "top_k", low=-1) or 0),
        top_p=read_number(values, "top_p", default=1.0, low=0, high=1, is_open=True),
        min_p=read_number(values, "min_p", default=0.0, low=0, high=1),
        repetition_penalty=_read_repetition_penalty(values),
        presence_penalty=read_number(values, "presence_penalty", default=0.0, low=-2, high=2),
        frequency_penalty=read_number(values, "frequency_penalty", default=0.0, low=-2, high=2),
        logit_bias=read_logit_bias(values, limits.vocab_size),
        bad_words=bad_words,
        allowed_token_ids=allowed,
        seed=seed,
        min_tokens=min_tokens,
        stop=read_stops(values),
        stop_token_ids=stop_token_ids,
        ignore_eos=ignores_eos,
        has_stop_in_text=read_flag(values, "include_stop_str_in_output"),
        num_logprobs=read_logprobs(values),
        num_prompt_logprobs=read_prompt_logprobs(values),
        num_choices=num_choices,
        num_shown_choices=num_shown_choices,
        has_echo=read_flag(values, "echo"),
        has_token_ids=read_flag(values, "return_token_ids"),
        cache_salt=_read_cache_salt(values),
        priority=read_integer(values, "priority", low=-MAX_INT32 - 1) or 0,
        prompt_cache_key=_read_cache_key(values),
        structured_output=read_structured_output(values),
    )


def _truncated(values: Values, token_ids: Sequence[int], max_model_len: int) -> Sequence[int]:
    """Keep the end of a prompt that may be cut; -1: all that leaves room for one token."""
    name = "truncate_prompt_tokens"
    num = read_integer(values, name, low=-1)
    if num is None:
        return token_ids
    if num == 0 or num >= max_model_len:
        raise invalid(f"{name} must be -1 or from 1 to {max_model_len - 1}, got {num}", name)
    return token_ids[-(max_model_len - 1 if num == -1 else num) :]


def _tokens_left(num_prompt_tokens: int, max_model_len: int, prompt_name: str) -> int:
    left = max_model_len - num_prompt_tokens
    if left < 1:
        raise ApiError(
            Verdict.CONTEXT_LENGTH,
            f"The context holds {max_model_len} tokens, but the prompt has {num_prompt_tokens} and "
            "leaves no room for a completion; shorten the prompt",
            param=prompt_name,
        )
    return left


def _read_max_tokens(values: Values, max_model_len: int, left: int) -> int | None:
    name = "max_tokens"
    asked = read_integer(values, name, low=1, high=MAX_SEED)
    newer = read_integer(values, "max_completion_tokens", low=1, high=MAX_SEED)
    if newer is not None:
        name = "max_completion_tokens"
        if asked is not None and asked != newer:
            raise invalid(f"max_tokens is {asked} but {name} is {newer}; give one of them", name)
        asked = newer
    if asked is not None and asked > left:
        num_prompt_tokens = max_model_len - left
        raise ApiError(
            Verdict.CONTEXT_LENGTH,
            f"The context holds {max_model_len} tokens, but {num_prompt_tokens + asked} were "
            f"asked for: {num_prompt_tokens} in the prompt and {asked} for the completion; "
            f"shorten the prompt or lower {name}",
            param=name,
        )
    return asked


def _read_temperature(values: Values) -> float:
    temperature = read_number(values, "temperature", default=1.0, low=0, high=2)
    # So small a number can only mean greedy, and dividing logits by it would overflow.
    return temperature if temperature >= GREEDY_BELOW else 0.0


def _read_repetition_penalty(values: Values) -> float:
    high = MAX_REPETITION_PENALTY
    return read_number(values, "repetition_penalty", default=1.0, low=1 / high, high=high)


def _read_seed(values: Values) -> int:
    seed = read_integer(values, "seed", low=-MAX_SEED - 1, high=MAX_SEED)
    # Drawn here and not in an engine: a request that moves to another worker keeps its seed.
    return secrets.randbits(63) if seed is None else seed


def _read_min_tokens(values: Values, max_tokens: int) -> int:
    min_tokens = read_integer(values, "min_tokens", low=0) or 0
    if min_tokens > max_tokens:
        raise invalid(
            f"min_tokens must be at most the completion's budget of {max_tokens} tokens, "
            f"got {min_tokens}",
            "min_tokens",
        )
    return min_tokens


def _read_cache_salt(values: Values) -> str:
    salt = read_text(values, "cache_salt", max_characters=MAX_CACHE_SALT_CHARACTERS)
    if salt is None:
        return ""
    if not salt or "\0" in salt:
        raise invalid("cache_salt must have characters, none of them NUL", "cache_salt")
    return salt


def _read_cache_key(values: Values) -> str:
    return read_text(values, "prompt_cache_key", max_characters=MAX_CACHE_KEY_CHARACTERS) or ""
