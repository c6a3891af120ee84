"""The routes of the HTTP server."""

import orjson
from starlette.exceptions import HTTPException
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route, Router
from starlette.types import Receive, Scope, Send

from api.anthropic.requests import read_messages_call
from api.anthropic.writer import MessageWriter
from api.api_keys import ApiKeys
from api.build import this_build
from api.errors import ApiError, Verdict
from api.generation_endpoint import GenerationEndpoint
from api.http_gate import HttpGate, error_response
from api.information_routes import InformationRoutes
from api.openai.requests import read_chat, read_completion
from api.openai.writer import chat_writer, completion_writer
from api.openapi.document import docs_page, openapi_document
from api.operations.dashboard import PATH, Dashboard, DashboardEndpoint
from api.operations.pulse import Pulse
from api.operations.trace_routes import TraceRoutes
from api.responses.requests import read_response_call
from api.responses.writer import ResponseWriter
from api.serving import Serving
from api.token_routes import TokenRoutes
from telemetry.prometheus_sink import PrometheusSink
from telemetry.trace_store import TraceStore


def build_http_app(
    serving: Serving, *, keys: ApiKeys, sink: PrometheusSink, traces: TraceStore, pulse: Pulse
) -> HttpGate:
    """Compose the HTTP face; it needs no lifespan."""
    information = InformationRoutes(serving, sink)
    tokens = TokenRoutes(serving)
    trace_routes = TraceRoutes(traces)
    dashboard = Dashboard(serving, pulse, traces, version=this_build().version)
    document = orjson.dumps(openapi_document(this_build().version))
    page = docs_page(document)

    async def openapi(_: Request) -> Response:
        return Response(document, media_type="application/json")

    async def docs(_: Request) -> Response:
        return HTMLResponse(page)

    chat = GenerationEndpoint(serving, read_chat, chat_writer)
    completion = GenerationEndpoint(serving, read_completion, completion_writer)
    messages = GenerationEndpoint(serving, read_messages_call, MessageWriter)
    responses = GenerationEndpoint(serving, read_response_call, ResponseWriter)
    endpoints = {
        "/v1/chat/completions": chat,
        "/v1/completions": completion,
        "/v1/responses": responses,
        "/v1/messages": messages,
    }
    routes = [
        *(Route(path, endpoint, methods=["POST"]) for path, endpoint in endpoints.items()),
        Route("/v1/messages/count_tokens", tokens.count_tokens, methods=["POST"]),
        Route("/tokenize", tokens.tokenize, methods=["POST"]),
        Route("/detokenize", tokens.detokenize, methods=["POST"]),
        Route("/v1/models", information.models),
        Route("/v1/models/{model:path}", information.model),
        Route("/v1/status", information.status),
        Route("/v1/loads", information.loads),
        Route("/v1/traces/{name}", trace_routes.trace),
        Route(PATH, DashboardEndpoint(dashboard), methods=["GET"]),
        Route("/health", information.health),
        Route("/ready", information.ready),
        Route("/version", information.version),
        Route("/metrics", information.metrics),
        Route("/openapi.json", openapi),
        Route("/docs", docs),
    ]
    # Not Starlette(): its own catch-all would answer before the gate, without label and verdict.
    app = ExceptionMiddleware(
        Router(routes, redirect_slashes=False), handlers={HTTPException: _on_http_exception}
    )

    async def switch(scope: Scope, receive: Receive, send: Send) -> None:
        # What is asked for most often needs no search.
        endpoint = endpoints.get(scope["path"]) if scope["method"] == "POST" else None
        await (app if endpoint is None else endpoint)(scope, receive, send)

    return HttpGate(
        switch,
        keys,
        routes=[route.path for route in routes],
        is_leaving=lambda: serving.is_leaving,
    )


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    verdicts = {404: Verdict.ROUTE_NOT_FOUND, 405: Verdict.METHOD_NOT_ALLOWED}
    verdict = verdicts.get(error.status_code, Verdict.INVALID)
    refusal = ApiError(verdict, f"{error.detail}; /docs lists the routes")
    response = error_response(refusal, request.state.request_label, path=request.url.path)
    response.headers.update(error.headers or {})
    return response
