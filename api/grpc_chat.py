"""Chats over gRPC: a message in, what the shared judgement reads; an answer out, as messages."""

from typing import Any

import grpc.aio
from relevo.v1 import common_pb2, inference_pb2

from api.chat.conversation import read_conversation
from api.chat.messages import MAX_MESSAGES
from api.chat.request import read_chat_request
from api.chat.tools import MAX_TOOLS
from api.choice_text import TextDelta, parts_of
from api.errors import invalid
from api.generation_request import GenerationRequest, read_model
from api.grpc_fields import FINISH_REASONS, read_fields
from api.grpc_run import GrpcRun, prompt_scored, scored
from api.json_text import parse_json
from api.openai.fields import CHAT_FIELDS, check_fields
from api.parsers.part import Part, PartKind, text_of
from api.serving import Serving
from api.text_stream import TextStream
from api.usage import Usage, served_by
from router.request import FinishReason
from telemetry import attributes

Context = grpc.aio.ServicerContext[Any, Any]


class GrpcChat:
    """Answers chats of the gRPC face."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    async def answer(
        self, chat: inference_pb2.Chat, context: Context
    ) -> inference_pb2.ChatResponse:
        """Return a whole answer."""
        run = self._run(chat, context)
        stream, answers = await run.whole(lambda: self._read(chat, is_stream=False))
        return inference_pb2.ChatResponse(
            request_id=stream.request_id,
            model=self._serving.model_config.model_id,
            choices=[
                inference_pb2.ChatChoice(
                    index=index,
                    message=_message(stream.request, answer),
                    finish_reason=_reason(stream, answer),
                    token_ids=answer.token_ids,
                    logprobs=scored(answer, self._serving),
                )
                for index, answer in enumerate(answers)
            ],
            usage=Usage.of([stream]).to_proto(),
            served_by=served_by(stream),
            prompt_logprobs=prompt_scored(stream, answers[0], self._serving),
        )

    async def send(self, chat: inference_pb2.Chat, context: Context) -> None:
        """Stream an answer."""
        run = self._run(chat, context)

        async def take(stream: TextStream, delta: TextDelta) -> None:
            parts = parts_of(stream.request, delta)
            message = inference_pb2.ChatStreamResponse(
                request_id=stream.request_id,
                model=self._serving.model_config.model_id,
                choice_index=delta.choice_index,
                content=text_of(parts, PartKind.CONTENT),
                reasoning_content=text_of(parts, PartKind.REASONING),
                tool_calls=[_call(part) for part in parts if part.kind is PartKind.CALL],
                token_ids=delta.token_ids,
                finish_reason=_reason(stream, delta),
                logprobs=scored(delta, self._serving),
                prompt_logprobs=prompt_scored(stream, delta, self._serving),
            )
            if stream.is_finished:
                message.usage.CopyFrom(Usage.of([stream]).to_proto())
                message.served_by.CopyFrom(served_by(stream))
            await run.write(message)

        await run.stream(lambda: self._read(chat, is_stream=True), take)

    def _run(self, chat: inference_pb2.Chat, context: Context) -> GrpcRun:
        priority = chat.generation.priority
        return GrpcRun(
            self._serving, context, operation=attributes.OPERATION_CHAT, priority=priority
        )

    async def tokenize(self, chat: inference_pb2.Chat) -> list[int]:
        """Return the ids of a chat's prompt."""
        prompt = await self._serving.tokenizer.encode_chat(
            read_conversation(read_chat(chat)), max_model_len=self._serving.limits().max_model_len
        )
        return prompt.token_ids

    async def _read(self, chat: inference_pb2.Chat, *, is_stream: bool) -> GenerationRequest:
        """Judge a chat exactly as one that came over HTTP."""
        values = read_chat(chat) | {"stream": is_stream}
        read_model(values, served_model=self._serving.model_config.model_id)
        if chat.generation.WhichOneof("prompt") is not None:
            raise invalid("A chat has messages and no prompt; leave it out", "prompt")
        check_fields(values, CHAT_FIELDS, is_strict=False)
        return await read_chat_request(values, self._serving)


def read_chat(chat: inference_pb2.Chat) -> dict[str, object]:
    """Return the values of a chat by OpenAI's names; ApiError when it is too much to be read."""
    if len(chat.messages) > MAX_MESSAGES:
        raise invalid(f"messages must be a list of 1 to {MAX_MESSAGES} messages", "messages")
    if len(chat.tools) > MAX_TOOLS:
        raise invalid(f"tools must be a list of at most {MAX_TOOLS} tools", "tools")
    values = read_fields(chat.generation)
    values["messages"] = [_read_message(message) for message in chat.messages]
    if chat.tools:
        values["tools"] = [_read_tool(tool, index) for index, tool in enumerate(chat.tools)]
    match chat.tool_choice.WhichOneof("choice"):
        case "mode":
            values["tool_choice"] = chat.tool_choice.mode
        case "function":
            named = {"name": chat.tool_choice.function}
            values["tool_choice"] = {"type": "function", "function": named}
    for name in ("parallel_tool_calls", "reasoning_effort"):
        if chat.HasField(name):
            values[name] = getattr(chat, name)
    if chat.HasField("enable_thinking"):
        values["chat_template_kwargs"] = {"enable_thinking": chat.enable_thinking}
    return values


def _read_message(message: inference_pb2.ChatMessage) -> dict[str, object]:
    read: dict[str, object] = {"role": message.role, "content": message.content}
    for name in ("name", "tool_call_id", "reasoning_content"):
        if value := getattr(message, name):
            read[name] = value
    if message.tool_calls:
        read["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in message.tool_calls
        ]
    return read


def _read_tool(tool: inference_pb2.Tool, index: int) -> dict[str, object]:
    function: dict[str, object] = {"name": tool.name, "description": tool.description or None}
    if tool.parameters:
        place = f"tools[{index}].function.parameters"
        try:
            function["parameters"] = parse_json(tool.parameters.encode())
        except ValueError as error:
            raise invalid(f"{place} cannot be read: {error}", place) from None
    return {"type": "function", "function": function}


def _message(request: GenerationRequest, answer: TextDelta) -> inference_pb2.ChatMessage:
    parts = parts_of(request, answer)
    return inference_pb2.ChatMessage(
        role="assistant",
        content=text_of(parts, PartKind.CONTENT),
        reasoning_content=text_of(parts, PartKind.REASONING),
        tool_calls=[_call(part) for part in parts if part.kind is PartKind.CALL],
    )


def _call(part: Part) -> inference_pb2.ToolCall:
    return inference_pb2.ToolCall(
        index=part.call_index, id=part.call_id, name=part.name, arguments=part.text
    )


def _reason(stream: TextStream, delta: TextDelta) -> common_pb2.FinishReason:
    """As over HTTP: an answer that ends with calls ends for them, unless one had been named."""
    reading = stream.request.reading
    has_calls = stream.choices[delta.choice_index].has_calls
    if delta.finish_reason is FinishReason.STOP and has_calls and reading and not reading.is_named:
        return common_pb2.FINISH_REASON_TOOL_CALLS
    return FINISH_REASONS[delta.finish_reason]
