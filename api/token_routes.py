"""HTTP routes between text and token ids."""

import asyncio
from collections.abc import Sequence

import orjson
from starlette.requests import Request
from starlette.responses import Response

from api.anthropic.requests import count_tokens
from api.chat.conversation import read_conversation
from api.errors import invalid
from api.generation_request import read_model
from api.http_body import read_json_object
from api.openai.fields import check_fields, warnings_header
from api.parameter_checks import Values, read_flag, read_token_ids
from api.serving import Serving
from api.token_text import token_text

_PROMPT_FIELDS = frozenset({"prompt", "add_special_tokens", "return_token_strs"})
TOKENIZE_FIELDS = _PROMPT_FIELDS | {
    *("model", "messages", "tools", "tool_choice", "parallel_tool_calls"),
    *("reasoning_effort", "chat_template_kwargs"),
}
DETOKENIZE_FIELDS = frozenset({"model", "tokens"})


class TokenRoutes:
    """Tokenises and detokenises with the model's own rules."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    async def tokenize(self, request: Request) -> Response:
        """Return the ids a prompt or a chat would have."""
        body = await read_json_object(request)
        unknown = self._check(body, TOKENIZE_FIELDS)
        max_model_len = self._serving.limits().max_model_len
        with_texts = read_flag(body, "return_token_strs")
        token_ids = await self._encode(body, max_model_len)
        answer: dict[str, object] = {
            "count": len(token_ids),
            "max_model_len": max_model_len,
            "tokens": token_ids,
        }
        if with_texts:
            token_bytes = self._serving.tokenizer.token_bytes
            answer["token_strs"] = [token_text(token_bytes(token_id)) for token_id in token_ids]
        return _json(answer, unknown)

    async def _encode(self, body: Values, max_model_len: int) -> list[int]:
        tokenizer = self._serving.tokenizer
        prompt, messages = body.get("prompt"), body.get("messages")
        if (prompt is None) == (messages is None):
            raise invalid("Give either prompt or messages", "prompt")
        if messages is not None:
            chat = await tokenizer.encode_chat(read_conversation(body), max_model_len=max_model_len)
            return chat.token_ids
        if not isinstance(prompt, str):
            raise invalid("prompt must be a string", "prompt")
        name = "add_special_tokens"
        has_special_tokens = body.get(name) is None or read_flag(body, name)
        return await tokenizer.encode(
            prompt, max_model_len=max_model_len, has_special_tokens=has_special_tokens
        )

    async def detokenize(self, request: Request) -> Response:
        """Return the text of ids, special tokens left out."""
        body = await read_json_object(request)
        unknown = self._check(body, DETOKENIZE_FIELDS)
        limits = self._serving.limits()
        token_ids = read_token_ids(
            body.get("tokens"),
            "tokens",
            vocab_size=limits.vocab_size,
            max_ids=limits.max_model_len,
        )
        text = await asyncio.to_thread(self._serving.tokenizer.detokenize, token_ids)
        return _json({"prompt": text}, unknown)

    async def count_tokens(self, request: Request) -> Response:
        """Return how long the prompt of a Messages request is."""
        body = await read_json_object(request)
        num_tokens, unknown = await count_tokens(body, self._serving)
        return _json({"input_tokens": num_tokens}, unknown)

    def _check(self, body: Values, served: frozenset[str]) -> list[str]:
        """Judge the names of the fields, and the model's where one is given."""
        if body.get("model") is not None:
            read_model(body, served_model=self._serving.model_config.model_id)
        return check_fields(body, served, is_strict=self._serving.config.strict)


def _json(value: object, unknown: Sequence[str] = ()) -> Response:
    headers = {"x-relevo-warnings": warnings_header(unknown)} if unknown else {}
    return Response(orjson.dumps(value), headers=headers, media_type="application/json")
