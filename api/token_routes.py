"""HTTP routes between text and token ids."""

import asyncio

import orjson
from starlette.requests import Request
from starlette.responses import Response

from api.anthropic.requests import count_tokens
from api.chat.conversation import read_conversation
from api.errors import invalid
from api.generation_request import read_model
from api.http_body import read_json_object
from api.parameter_checks import Values, read_token_ids
from api.serving import Serving


class TokenRoutes:
    """Tokenises and detokenises with the model's own rules."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    async def tokenize(self, request: Request) -> Response:
        """Return the ids a prompt or a chat would have."""
        body = await read_json_object(request)
        self._check_model(body)
        max_model_len = self._serving.limits().max_model_len
        prompt, messages = body.get("prompt"), body.get("messages")
        if (prompt is None) == (messages is None):
            raise invalid("Give either prompt or messages", "prompt")
        if messages is not None:
            prompt_ = await self._serving.tokenizer.encode_chat(
                read_conversation(body), max_model_len=max_model_len
            )
            token_ids = prompt_.token_ids
        elif isinstance(prompt, str):
            token_ids = await self._serving.tokenizer.encode(prompt, max_model_len=max_model_len)
        else:
            raise invalid("prompt must be a string", "prompt")
        return _json({"count": len(token_ids), "max_model_len": max_model_len, "tokens": token_ids})

    async def detokenize(self, request: Request) -> Response:
        """Return the text of ids, special tokens left out."""
        body = await read_json_object(request)
        self._check_model(body)
        limits = self._serving.limits()
        token_ids = read_token_ids(
            body.get("tokens"),
            "tokens",
            vocab_size=limits.vocab_size,
            max_ids=limits.max_model_len,
        )
        text = await asyncio.to_thread(self._serving.tokenizer.detokenize, token_ids)
        return _json({"prompt": text})

    async def count_tokens(self, request: Request) -> Response:
        """Return how long the prompt of a Messages request is."""
        body = await read_json_object(request)
        return _json({"input_tokens": await count_tokens(body, self._serving)})

    def _check_model(self, body: Values) -> None:
        if body.get("model") is not None:
            read_model(body, served_model=self._serving.model_config.model_id)


def _json(value: object) -> Response:
    return Response(orjson.dumps(value), media_type="application/json")
