"""Templates that write calls in words that are read here, and others."""

import pytest
from transformers import PreTrainedTokenizerFast

from api.chat.template import ChatTemplate
from tests.tiny_tokenizer import byte_level_backend

HEAD = (
    "{% if tools %}Tools: {{ tools | tojson }}\n{% endif %}"
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content }}"
    "{% for call in message.tool_calls or [] %}"
)
TAIL = (
    "{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Every shape is a model's own: Hermes and Qwen, QwQ, Llama 3, Mistral old and new, GPT-OSS.
READ = {
    "hermes": "<tool_call>\n{{ call.function | tojson }}\n</tool_call>",
    "llama": '{"name": "{{ call.function.name }}", '
    '"parameters": {{ call.function.arguments | tojson }}}',
    "mistral": '[TOOL_CALLS] [{"name": "{{ call.function.name }}", '
    '"arguments": {{ call.function.arguments | tojson }}, "id": "{{ call.id }}"}]',
    "mistral by name": "[TOOL_CALLS]{{ call.function.name }}[ARGS]"
    "{{ call.function.arguments | tojson }}",
    "gpt-oss": "<|channel|>commentary to=functions.{{ call.function.name }} <|constrain|>json"
    "<|message|>{{ call.function.arguments | tojson }}<|call|>",
}
# Qwen 3 Coder, GLM, DeepSeek; a template that forgets its calls; one that refuses.
UNREAD = {
    "xml": "<tool_call>\n<function={{ call.function.name }}>{% for key, value in "
    "call.function.arguments | items %}<parameter={{ key }}>\n{{ value }}\n</parameter>"
    "{% endfor %}</function>\n</tool_call>",
    "pairs": "<tool_call>{{ call.function.name }}{% for key, value in "
    "call.function.arguments | items %}<arg_key>{{ key }}</arg_key><arg_value>{{ value }}"
    "</arg_value>{% endfor %}</tool_call>",
    "fences": "<|tool_call_begin|>function<|tool_sep|>{{ call.function.name }}\n```json\n"
    "{{ call.function.arguments | tojson }}\n```<|tool_call_end|>",
    "nothing": "",
    "a refusal": "{{ raise_exception('no calls here') }}",
}


def template_of(call: str) -> ChatTemplate:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=byte_level_backend(), chat_template=HEAD + call + TAIL
    )
    return ChatTemplate(tokenizer, ["<|im_start|>", "<|im_end|>"])


@pytest.mark.parametrize("name", READ)
def test_a_template_whose_calls_are_read_shows_the_tools_itself(name: str) -> None:
    assert template_of(READ[name]).dialect.has_tools


@pytest.mark.parametrize("name", UNREAD)
def test_any_other_is_told_of_tools_in_words_that_are_read(name: str) -> None:
    template = template_of(UNREAD[name])
    assert not template.dialect.has_tools
    assert template.dialect.syntax.mark == "<tool_call>"
