"""Turns the body of an OpenAI request into generation requests."""

from collections.abc import Sequence

from api.call import Call
from api.chat.request import read_chat_request
from api.errors import invalid, show
from api.generation_request import GenerationRequest, read_model, validate
from api.logprobs_parameters import read_chat_logprobs, read_completion_logprobs
from api.openai.fields import (
    CHAT_FIELDS,
    COMPLETION_FIELDS,
    SERVICE_TIER,
    check_fields,
    read_stream,
)
from api.parameter_checks import Values, read_token_ids
from api.serving import Serving
from telemetry import attributes

# OpenAI's default for the older API; a chat goes on to the end of the context.
DEFAULT_COMPLETION_TOKENS = 16
MAX_PROMPTS = 128
MAX_CHOICES = 1024  # of all prompts together


async def read_chat(body: Values, serving: Serving) -> Call:
    """Read the body of /v1/chat/completions."""
    unknown = _check(body, CHAT_FIELDS, serving)
    streaming = read_stream(body)
    values = {**body, "logprobs": read_chat_logprobs(body)}
    return Call(
        operation=attributes.OPERATION_CHAT,
        requests=[await read_chat_request(values, serving)],
        streaming=streaming,
        unknown_fields=unknown,
        echoed=_echoed(body),
    )


async def read_completion(body: Values, serving: Serving) -> Call:
    """Read the body of /v1/completions."""
    unknown = _check(body, COMPLETION_FIELDS, serving)
    streaming = read_stream(body)
    limits = serving.limits()
    values = {**body, "logprobs": read_completion_logprobs(body)}
    is_cut = body.get("truncate_prompt_tokens") is not None
    requests = [
        serving.lay_out_echo(
            validate(
                values,
                token_ids=await _encode(prompt, serving),
                limits=limits,
                default_max_tokens=DEFAULT_COMPLETION_TOKENS,
            ),
            prompt if isinstance(prompt, str) and not is_cut else None,
        )
        for prompt in _read_prompts(body.get("prompt"))
    ]
    _check_total(requests, serving)
    await serving.check_grammar(requests[0])  # one for all prompts
    return Call(
        operation=attributes.OPERATION_TEXT_COMPLETION,
        requests=requests,
        streaming=streaming,
        unknown_fields=unknown,
        echoed=_echoed(body),
    )


def _check(body: Values, served: frozenset[str], serving: Serving) -> list[str]:
    read_model(body, served_model=serving.model_config.model_id)
    return check_fields(body, served, is_strict=serving.config.strict)


def _echoed(body: Values) -> dict[str, object]:
    return {} if body.get("service_tier") is None else {"service_tier": SERVICE_TIER}


def _check_total(requests: Sequence[GenerationRequest], serving: Serving) -> None:
    total = sum(request.num_choices for request in requests)
    if total > MAX_CHOICES:
        raise invalid(
            f"prompts times choices must be at most {MAX_CHOICES}, got {total}; send fewer prompts "
            "or ask for fewer choices",
            "n",
        )
    num_choices = requests[0].num_choices
    most = serving.upstream.max_requests(num_choices)
    if len(requests) > most:
        choices = f" of {num_choices} choices each" if num_choices > 1 else ""
        raise invalid(
            f"prompt has {len(requests)} entries{choices}, but at most {most} can run or wait "
            "together here; send fewer prompts at once",
            "prompt",
        )


def _read_prompts(value: object) -> list[object]:
    """Tell apart the four forms: text, texts, ids, lists of ids."""
    if value is None:
        raise invalid("prompt is required", "prompt")
    if isinstance(value, str):
        return [value]
    if value == []:
        raise invalid("prompt is empty; give at least one token", "prompt")
    if not isinstance(value, list):
        raise invalid(
            f"prompt must be text, token ids or a list of these, got {show(value)}", "prompt"
        )
    first = value[0]
    if isinstance(first, int):
        return [value]
    if not isinstance(first, str | list):
        raise invalid(f"prompt must hold text or token ids, got {show(first)}", "prompt")
    if len(value) > MAX_PROMPTS:
        raise invalid(f"prompt must have at most {MAX_PROMPTS} entries, got {len(value)}", "prompt")
    kind = str if isinstance(first, str) else list
    if not all(isinstance(each, kind) for each in value):
        raise invalid("prompt must not mix text and token ids", "prompt")
    return value


async def _encode(prompt: object, serving: Serving) -> Sequence[int]:
    limits = serving.limits()
    if isinstance(prompt, str):
        return await serving.tokenizer.encode(prompt, max_model_len=limits.max_model_len)
    return read_token_ids(
        prompt, "prompt", vocab_size=limits.vocab_size, max_ids=limits.max_model_len
    )
