"""The parameters of a public Generation message, under the names they have over HTTP."""

from relevo.v1 import common_pb2, inference_pb2

from router.request import FinishReason

FINISH_REASONS = {
    None: common_pb2.FINISH_REASON_UNSPECIFIED,
    FinishReason.STOP: common_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
}

_OPTIONAL_FIELDS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "seed",
    "max_tokens",
    "min_tokens",
    "cache_salt",
    "priority",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logprobs",
    "prompt_logprobs",
    "prompt_cache_key",
    "n",
    "best_of",
    "truncate_prompt_tokens",
)
_LISTS = ("stop", "stop_token_ids", "bad_words", "allowed_token_ids")
_FLAGS = ("ignore_eos", "include_stop_str_in_output", "echo")


def read_fields(generation: inference_pb2.Generation) -> dict[str, object]:
    """Return what was set, and the flags; the prompt and all judgement are left to the caller."""
    values: dict[str, object] = {
        name: getattr(generation, name) for name in _OPTIONAL_FIELDS if generation.HasField(name)
    }
    values["model"] = generation.model
    values |= {name: getattr(generation, name) for name in _FLAGS}
    values |= {name: list(each) for name in _LISTS if (each := getattr(generation, name))}
    if generation.logit_bias:
        values["logit_bias"] = dict(generation.logit_bias)
    if generation.HasField("structured_outputs"):
        values["structured_outputs"] = _structured_outputs(generation.structured_outputs)
    return values


def _structured_outputs(message: inference_pb2.StructuredOutputs) -> dict[str, object]:
    """Return the constraint as it comes over HTTP."""
    kind = message.WhichOneof("constraint")
    if kind is None:
        return {}
    return {kind: list(message.choice.texts) if kind == "choice" else getattr(message, kind)}
