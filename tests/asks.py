"""Requests that use every feature, over both faces, and their answers in one comparable form.

Logprobs lose their last digits: in which company a token is computed changes those, even in
float64.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx
from relevo.v1 import common_pb2, inference_pb2, inference_pb2_grpc

from tests.tiny_model import EOS_TOKEN_ID, make_tokenizer

PROMPT = "A prefill worker reads the prompt and hands the cache over to a decode worker. "
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
_REASONS = {
    common_pb2.FINISH_REASON_STOP: "stop",
    common_pb2.FINISH_REASON_LENGTH: "length",
}


def letter_ids() -> list[int]:
    """Tokens of one plain letter each, so that text and tokens run side by side."""
    tokenizer = make_tokenizer()
    return [int(tokenizer.convert_tokens_to_ids(letter)) for letter in LETTERS]


@dataclass(slots=True)
class Told:
    """What was told of one choice."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    finish_reason: str = ""


@dataclass(slots=True)
class Answer:
    """All a client got, without ids and times."""

    choices: dict[int, Told] = field(default_factory=dict)
    prompt_logprobs: list[Any] = field(default_factory=list)
    usage: tuple[int, int, int] = (0, 0, 0)  # prompt, completion, cached

    def of(self, index: int) -> Told:
        return self.choices.setdefault(index, Told())


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One kind of request. `label` is its X-Request-Id."""

    name: str
    body: Mapping[str, Any]  # of /v1/completions, or of chat where it has messages
    face: str = "http"
    is_stream: bool = True

    @property
    def label(self) -> str:
        return f"{self.name}-{self.face}-{'stream' if self.is_stream else 'whole'}"

    async def send(
        self,
        http: httpx.AsyncClient,
        stub: inference_pb2_grpc.InferenceServiceStub,
        *,
        salt: str,
        label: str | None = None,
    ) -> Answer:
        """Send it, with a prefix cache of its own, and read the whole answer."""
        label = label or self.label
        if self.face == "grpc":
            return await self._send_grpc(stub, salt=salt, label=label)
        return await self._send_http(http, salt=salt, label=label)

    async def _send_http(self, http: httpx.AsyncClient, *, salt: str, label: str) -> Answer:
        body = {"model": "tiny", "return_token_ids": True, **self.body, "cache_salt": salt}
        if self.is_stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        response = await http.post(path, json=body, headers={"x-request-id": label})
        assert response.status_code == 200, response.text
        if not self.is_stream:
            return _take_body(Answer(), response.json())
        *events, last = [e for e in response.text.split("\n\n") if e.startswith("data: ")]
        assert last == "data: [DONE]", last
        answer = Answer()
        for event in events:
            _take_body(answer, json.loads(event.removeprefix("data: ")))
        return answer

    async def _send_grpc(
        self, stub: inference_pb2_grpc.InferenceServiceStub, *, salt: str, label: str
    ) -> Answer:
        generation = generation_of({"model": "tiny", **self.body, "cache_salt": salt})
        metadata = (("x-request-id", label),)
        answer = Answer()
        if not self.is_stream:
            request = inference_pb2.GenerateRequest(generation=generation)
            whole = await stub.Generate(request, metadata=metadata)
            for choice in whole.choices or [whole]:
                _take_message(answer.of(getattr(choice, "index", 0)), choice)
            answer.prompt_logprobs += [_scored(each) for each in whole.prompt_logprobs]
            answer.usage = _usage(whole.usage)
            return answer
        request = inference_pb2.GenerateStreamRequest(generation=generation)
        async for message in stub.GenerateStream(request, metadata=metadata):
            _take_message(answer.of(message.choice_index), message)
            answer.prompt_logprobs += [_scored(each) for each in message.prompt_logprobs]
            if message.HasField("usage"):
                answer.usage = _usage(message.usage)
        return answer


def generation_of(body: Mapping[str, Any]) -> inference_pb2.Generation:
    """The same request for gRPC."""
    fields = {**body, "text": body["prompt"]}
    del fields["prompt"]
    return inference_pb2.Generation(**fields)


def _take_body(answer: Answer, body: Mapping[str, Any]) -> Answer:
    if body.get("usage"):
        usage = body["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        answer.usage = (usage["prompt_tokens"], usage["completion_tokens"], cached)
    for choice in body["choices"]:
        told = answer.of(choice["index"])
        content = choice.get("delta") or choice.get("message") or {"content": choice.get("text")}
        told.text += content.get("content") or ""
        told.token_ids += choice.get("token_ids") or []
        told.logprobs += _pairs(choice.get("logprobs") or {})
        if choice.get("finish_reason"):
            assert not told.finish_reason, "two finishes of one choice"
            told.finish_reason = choice["finish_reason"]
    return answer


def _pairs(logprobs: Mapping[str, Any]) -> list[Any]:
    top = "top_logprobs"
    if "content" in logprobs:
        return [
            _rounded(
                [each["token"], each["logprob"], [[t["token"], t["logprob"]] for t in each[top]]]
            )
            for each in logprobs["content"] or []
        ]
    tops = logprobs.get(top) or []
    names, values = logprobs.get("tokens", []), logprobs.get("token_logprobs", [])
    return [_rounded(list(each)) for each in zip(names, values, tops, strict=True)]


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 8)
    if isinstance(value, list):
        return [_rounded(each) for each in value]
    if isinstance(value, dict):
        return {name: _rounded(each) for name, each in value.items()}
    return value


def _take_message(told: Told, message: Any) -> None:
    told.text += message.text
    told.token_ids += message.token_ids
    told.logprobs += [_scored(each) for each in message.logprobs]
    if message.finish_reason:
        assert not told.finish_reason, "two finishes of one choice"
        told.finish_reason = _REASONS[message.finish_reason]


def _scored(each: inference_pb2.TokenLogprobs) -> Any:
    top = [[candidate.token_id, candidate.logprob] for candidate in each.top]
    return _rounded([each.token_id, each.logprob, each.rank, top])


def _usage(usage: inference_pb2.Usage) -> tuple[int, int, int]:
    return usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens


def every_ask(stop: str) -> list[Ask]:
    """Every feature on each face, whole and streamed; `stop` is where the plain text shall end."""
    letters = {"allowed_token_ids": letter_ids()}
    plain = {"prompt": PROMPT, "max_tokens": 20, "temperature": 0, "ignore_eos": True}
    sampled = {**plain, "temperature": 1.0, "seed": 7}
    bodies: dict[str, dict[str, Any]] = {
        "plain": plain,
        "penalties": {
            **sampled,
            "repetition_penalty": 1.3,
            "presence_penalty": 0.4,
            "frequency_penalty": 0.6,
            "top_p": 0.9,
            "bad_words": ["e"],
            "logprobs": 2,
        },
        "stop": {**plain, **letters, "stop": [stop]},
        "min_tokens": {
            "prompt": PROMPT,
            "temperature": 0,
            "max_tokens": 30,
            "min_tokens": 9,
            "logit_bias": {EOS_TOKEN_ID: 100},
        },
        "one": {**plain, "max_tokens": 1},
        "end at once": {
            "prompt": PROMPT,
            "temperature": 0,
            "max_tokens": 30,
            "logit_bias": {EOS_TOKEN_ID: 100},
        },
        "choices": {
            **sampled,
            **letters,
            "ignore_eos": False,
            "allowed_token_ids": [*letter_ids(), EOS_TOKEN_ID],
            "logit_bias": {EOS_TOKEN_ID: 3.5},
            "n": 3,
            "stop": ["Q"],
        },
        "grammar": {
            **sampled,
            "ignore_eos": False,
            "structured_outputs": {"regex": "([a-z]{2,5}-){3}[a-z]{4}"},
        },
    }
    asks = []
    for name, body in bodies.items():
        for is_stream in (True, False):
            grpc_body = dict(body)
            if name == "grammar":
                regex = body["structured_outputs"]["regex"]
                grpc_body["structured_outputs"] = inference_pb2.StructuredOutputs(regex=regex)
            asks.append(Ask(name=name, body=body, is_stream=is_stream))
            asks.append(Ask(name=name, body=grpc_body, face="grpc", is_stream=is_stream))
    asks += [
        Ask(
            name="echo",
            body={**sampled, "echo": True, "logprobs": 2, "max_tokens": 8},
            is_stream=is_stream,
        )
        for is_stream in (True, False)
    ]
    asks += [
        Ask(name="prompt_logprobs", body={**sampled, "prompt_logprobs": 1}, face="grpc"),
        Ask(name="best", body={**sampled, "n": 2, "best_of": 3}, is_stream=False),
        Ask(
            name="schema",
            body={
                "messages": [{"role": "user", "content": "Say it."}],
                "temperature": 1.0,
                "seed": 3,
                "max_tokens": 60,
                "logprobs": True,
                "top_logprobs": 2,
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {
                        "name": "thing",
                        "schema": {
                            "type": "object",
                            "properties": {"name": {"enum": ["fox", "dog", "a lazy one"]}},
                            "required": ["name"],
                            "additionalProperties": False,
                        },
                    },
                },
            },
        ),
    ]
    return asks
