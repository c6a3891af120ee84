"""Whether a call that a chat template writes is read back here.

Models write calls as their templates do. Many templates have words for them that no parser here
knows: then the model is better told of its tools in words that one does (`tool_prompt.py`).
"""

import json
import logging

from transformers import PreTrainedTokenizerFast

from api.parsers.part import join_parts
from api.parsers.reading import Dialect, Reading

_NAME = "look_up"
_ARGUMENTS = {"city": "Oslo", "days": 3}
_PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "where"},
        "days": {"type": "integer", "description": "how many"},
    },
    "required": ["city"],
}
_TOOL = {
    "type": "function",
    "function": {"name": _NAME, "description": "Looks it up.", "parameters": _PARAMETERS},
}
_ASKED = {"role": "user", "content": "How is it?"}
_ANSWER = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        # Mistral's templates want an id of nine characters.
        {
            "id": "abcdefghi",
            "type": "function",
            "function": {"name": _NAME, "arguments": _ARGUMENTS},
        }
    ],
}

_LOGGER = logging.getLogger(__name__)


def reads_calls_back(dialect: Dialect, tokenizer: PreTrainedTokenizerFast) -> bool:
    """Let the template write a call, and read it; False when it writes none."""
    try:
        asked, answered = (
            tokenizer.apply_chat_template(
                messages, tools=[_TOOL], tokenize=False, add_generation_prompt=is_asked
            )
            for messages, is_asked in (([_ASKED], True), ([_ASKED, _ANSWER], False))
        )
    except Exception as error:
        # The template is a program of others.
        _LOGGER.debug("The chat template writes no calls", exc_info=error)
        return False
    pairs = enumerate(zip(asked, answered, strict=False))
    start = next((place for place, (one, other) in pairs if one != other), len(asked))
    # Both may go on with the same mark's beginning: the call's, and that of a thought.
    starts = {start, max(answered.rfind("<", 0, start + 1), 0)}
    return any(_is_read(dialect, answered[each:]) for each in starts)


def _is_read(dialect: Dialect, text: str) -> bool:
    parser = Reading(dialect=dialect, names={_NAME}).new_parser()
    calls = [part for part in join_parts([*parser.push(text), *parser.flush()]) if part.name]
    if len(calls) != 1:
        return False
    try:
        arguments = json.loads(calls[0].text)
    except ValueError:
        return False
    return bool(arguments == _ARGUMENTS)
