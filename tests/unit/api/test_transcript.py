"""What a span keeps of the words of a request: their shape, and never more than the bound."""

import json

from api.chat.messages import read_messages
from api.choice_text import TextDelta
from api.generation_request import GenerationRequest
from api.parsers.part import Part, PartKind
from api.parsers.reading import Dialect, Reading
from api.transcript import MAX_CHARACTERS, MAX_PROMPT_TOKENS, Transcript, content_attributes
from router.request import FinishReason


def told(*transcripts: Transcript) -> tuple[list[dict], list[dict], bool]:
    found = content_attributes(transcripts)
    texts = (found["gen_ai.input.messages"], found["gen_ai.output.messages"])
    assert all(isinstance(text, str) and len(text) < 2 * MAX_CHARACTERS for text in texts)
    asked, answered = (json.loads(text) for text in texts)
    return asked, answered, bool(found["relevo.content.is_cut"])


def text_of(message: dict) -> str:
    return "".join(part["content"] for part in message["parts"])


def test_a_prompt_and_its_choices() -> None:
    request = GenerationRequest(token_ids=[1, 2], max_tokens=8, num_choices=2)
    transcript = Transcript(request, prompt="Once")
    transcript.take(TextDelta("up", [5], choice_index=1))
    transcript.take(TextDelta("on", [6], FinishReason.STOP, choice_index=1))
    asked, answered, is_cut = told(transcript)
    assert asked == [{"role": "user", "parts": [{"type": "text", "content": "Once"}]}]
    assert answered == [
        {"role": "assistant", "parts": [], "finish_reason": ""},
        {
            "role": "assistant",
            "parts": [{"type": "text", "content": "upon"}],
            "finish_reason": "stop",
        },
    ]
    assert not is_cut


def test_a_chat_with_tools_has_the_parts_of_the_conventions() -> None:
    call = {"id": "c1", "function": {"name": "f", "arguments": '{"x": 1}'}}
    messages = read_messages(
        [
            {"role": "system", "content": "Be brief."},
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "content": "2", "tool_call_id": "c1"},
        ]
    )
    reading = Reading(dialect=Dialect(), names=("f",))
    request = GenerationRequest(token_ids=[1], max_tokens=8, messages=messages, reading=reading)
    transcript = Transcript(request, prompt="")
    thought = [Part(PartKind.REASONING, "hm"), Part(PartKind.CALL, '{"y":', 0, "c2", "f")]
    transcript.take(TextDelta("…", [5], parts=thought))
    transcript.take(TextDelta("…", [6], parts=[Part(PartKind.CALL, "2}")]))
    asked, answered, _ = told(transcript)
    assert asked[1]["parts"] == [
        {"type": "tool_call", "id": "c1", "name": "f", "arguments": '{"x":1}'}
    ]
    assert asked[2] == {
        "role": "tool",
        "parts": [{"type": "tool_call_response", "id": "c1", "response": "2"}],
    }
    assert answered[0]["parts"] == [
        {"type": "reasoning", "content": "hm"},
        {"type": "tool_call", "id": "c2", "name": "f", "arguments": '{"y":2}'},
    ]


def test_of_a_long_chat_the_end_is_kept_and_of_an_answer_the_beginning() -> None:
    messages = [{"role": "user", "content": f"{n} " + "x" * 900} for n in range(50)]
    request = GenerationRequest(token_ids=[1], max_tokens=8, messages=messages)
    transcript = Transcript(request, prompt="")
    for number in range(30_000):
        transcript.take(TextDelta(f"{number} ", [1]))
    asked, answered, is_cut = told(transcript)
    assert is_cut
    assert text_of(asked[-1]).startswith("49 ")
    assert 10 < len(asked) < 20
    assert text_of(answered[0]).startswith("0 1 2 ")
    assert sum(len(part) for part in transcript._answers) < MAX_CHARACTERS


def test_many_prompts_share_one_bound() -> None:
    request = GenerationRequest(token_ids=[1] * (MAX_PROMPT_TOKENS + 1), max_tokens=8)
    transcripts = [Transcript(request, prompt="y" * 5000) for _ in range(128)]
    asked, _, is_cut = told(*transcripts)
    assert is_cut
    assert sum(len(text_of(each)) for each in asked) <= MAX_CHARACTERS
