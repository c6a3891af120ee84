"""Turns a chat, from whichever face, into one generation request."""

from dataclasses import replace

from api.chat.conversation import Conversation, read_conversation
from api.chat.tools import Choice
from api.errors import invalid
from api.generation_request import GenerationRequest, validate
from api.parameter_checks import Values
from api.parsers.reading import Reading
from api.serving import Serving
from api.structured_output import StructuredOutput
from api.tokenizer import ChatPrompt


async def read_chat_request(
    values: Values, serving: Serving, *, prompt_name: str = "messages"
) -> GenerationRequest:
    """Judge, render and tokenise; `values` has OpenAI's names, with `logprobs` a number."""
    chat = read_conversation(values)
    limits = serving.limits()
    prompt = await serving.tokenizer.encode_chat(chat, max_model_len=limits.max_model_len)
    request = validate(values, token_ids=prompt.token_ids, limits=limits, prompt_name=prompt_name)
    request = replace(
        request,
        messages=chat.messages,
        structured_output=_structured_output(request, chat),
        reading=_reading(chat, serving, prompt),
    )
    await serving.check_grammar(request)
    return request


def _structured_output(request: GenerationRequest, chat: Conversation) -> StructuredOutput | None:
    """What the answer must match: enforces calls where they are wanted."""
    use, other = chat.tool_use, request.structured_output
    if not use.is_enforced:
        return other
    if other is not None or request.ignore_eos:
        name = "ignore_eos" if other is None else other.field
        raise invalid(
            f"tool_choice = {use.choice} cannot be with {name}; leave one out", "tool_choice"
        )
    return use.grammar()


def _reading(chat: Conversation, serving: Serving, prompt: ChatPrompt) -> Reading | None:
    use = chat.tool_use
    reading = Reading(
        dialect=serving.tokenizer.dialect,
        names=use.names,
        is_parallel=use.is_parallel,
        is_enforced=use.is_enforced,
        is_named=use.choice is Choice.NAMED,
        is_thinking=prompt.opens_thought,
    )
    return reading if reading.is_needed else None
