"""Whatever a client sends is a request or a verdict below 500, never another exception."""

import asyncio
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from api.config import IngressConfig, ModelConfig
from api.errors import ApiError
from api.openai.fields import CHAT_FIELDS, COMPLETION_FIELDS, HARMLESS_FIELDS, UNSERVED_FIELDS
from api.openai.requests import Call, read_chat, read_completion
from api.serving import Serving
from api.tokenizer import Tokenizer
from tests.fake_router import FakeRouter
from tests.tiny_tokenizer import write_tokenizer

NAMES = sorted(CHAT_FIELDS | COMPLETION_FIELDS | HARMLESS_FIELDS | set(UNSERVED_FIELDS))
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**64), 2**64)
    | st.sampled_from([0, 1, 2, 5, 0.5, 1.0])
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
    | st.sampled_from(["user", "system", "text", "tiny", "<|im_end|>"])
    | st.sampled_from(["function", "required", "auto", "low", "object"])
)
KEYS = st.sampled_from(
    ["role", "content", "type", "text", "name", "include_usage", "function", "parameters", "id"]
) | st.sampled_from(
    ["tool_calls", "arguments", "tools", "mode", "allowed_tools", "enable_thinking"]
)
KEYS |= st.text()
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=8,
)
BODIES = st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=4), VALUES, max_size=6)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "system", "tool"]) | SCALARS},
        optional={"content": VALUES, "tool_calls": VALUES, "tool_call_id": VALUES},
    ),
    max_size=3,
)


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Serving:
    path: Path = write_tokenizer(tmp_path_factory.mktemp("model"))
    return Serving(
        IngressConfig(),
        ModelConfig(model_id="tiny", path=str(path)),
        tokenizer=Tokenizer.load(str(path)),
        upstream=FakeRouter(),
    )


def check(body: dict[str, object], serving: Serving) -> None:
    for read in (read_chat, read_completion):
        outcome: Call | ApiError
        try:
            outcome = asyncio.run(read(body, serving))
        except ApiError as error:
            outcome = error
        if isinstance(outcome, ApiError):
            assert outcome.face.http_status in {400, 404}
            assert len(outcome.message) <= 1024
            continue
        for request in outcome.requests:
            request.to_sampling_params()
            assert len(request.token_ids) + request.max_tokens <= 256


@settings(max_examples=80, deadline=None)
@given(body=BODIES, messages=MESSAGES, prompt=VALUES)
def test_any_body_is_judged(
    serving: Serving, body: dict[str, object], messages: object, prompt: object
) -> None:
    check(body, serving)
    check({"model": "tiny", "messages": messages, "prompt": prompt}, serving)
    check({"messages": messages, "prompt": prompt, **body, "model": "tiny"}, serving)
    tool = {"type": "function", "function": {"name": "f", "parameters": prompt}}
    check({"tools": [tool], "tool_choice": "required", **body, "model": "tiny"}, serving)
    served = {name: value for name, value in body.items() if name in CHAT_FIELDS}
    chat = [{"role": "user", "content": "hi"}]
    check({**served, "model": "tiny", "messages": chat, "prompt": "hi"}, serving)
