"""The OpenAPI document of the HTTP server and the page that shows it, both without any network."""

import importlib.resources

from api.errors import Verdict
from api.http_gate import is_anthropic
from api.openapi.answers import ANSWERS, ANTHROPIC_ERROR, ERROR, EVENT
from api.openapi.bodies import BODIES, Body
from api.openapi.fields import Json, record
from api.request_timeout import TIMEOUT_HEADER

_TIMEOUT: Json = {
    "name": TIMEOUT_HEADER,
    "in": "header",
    "required": False,
    "schema": {"type": "number", "exclusiveMinimum": 0},
    "description": "Seconds from arrival to the end; the server's own limit where it is shorter",
}


def openapi_document(version: str) -> Json:
    """Return the description of every route."""
    posts = {path: _post(path, body) for path, body in BODIES.items()}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Relevo", "version": version},
        "paths": {
            **posts,
            "/v1/models": _get("List the served model"),
            "/v1/models/{model}": _get("Describe the served model", _parameter("model", "path")),
            "/v1/status": _get("State of the cluster", _parameter("routes", "query")),
            "/v1/loads": _get("Load of every live worker"),
            "/v1/traces/{name}": _get(
                "Spans of one of the last requests: its id, its label or a trace id",
                _parameter("name", "path"),
            ),
            "/dashboard": _get(
                "The cluster as a page; live with `Accept: text/event-stream`", media="text/html"
            ),
            "/health": _get("This process answers", is_open=True),
            "/ready": _get("A request sent now would be served", is_open=True),
            "/version": _get("Version of the server"),
            "/metrics": _get("Prometheus page of this ingress and all workers"),
            "/openapi.json": _get("This document"),
            "/docs": _get("This document as a page"),
        },
        "components": {
            "schemas": {"Error": ERROR, "AnthropicError": ANTHROPIC_ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}, {}],
    }


def docs_page(document: bytes) -> str:
    """Return one self-contained page with the document inside."""
    page = importlib.resources.files("api").joinpath("static/docs.html").read_text()
    return page.replace("__OPENAPI__", document.decode().replace("<", "\\u003c"))


def _post(path: str, body: Body) -> Json:
    schema = record(body.properties, *body.required)
    content = {"application/json": {"schema": schema, "example": body.example}}
    answer: Json = {"application/json": {"schema": ANSWERS[path]}}
    if body.can_stream:
        answer["text/event-stream"] = {"schema": EVENT}
    operation: Json = {
        "summary": body.summary,
        "requestBody": {"required": True, "content": content},
        "responses": {"200": {"description": "Success", "content": answer}, **_errors(path)},
    }
    if body.can_stream:
        operation["parameters"] = [_TIMEOUT]
    return {"post": operation}


def _get(
    summary: str, *parameters: Json, is_open: bool = False, media: str = "application/json"
) -> Json:
    success: Json = {"description": "Success"}
    if media != "application/json":
        success["content"] = {media: {}}
    operation: Json = {"summary": summary, "responses": {"200": success, **_errors("")}}
    if parameters:
        operation["parameters"] = list(parameters)
    if is_open:
        operation["security"] = []
    return {"get": operation}


def _parameter(name: str, place: str) -> Json:
    return {"name": name, "in": place, "required": place == "path", "schema": {"type": "string"}}


def _errors(path: str) -> Json:
    """One entry for each status of the table of verdicts."""
    name = "AnthropicError" if is_anthropic(path) else "Error"
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}
    codes: dict[int, list[str]] = {}
    for verdict in Verdict:
        codes.setdefault(verdict.value.http_status, []).append(verdict.value.code)
    return {
        str(status): {"description": ", ".join(codes[status]), "content": content}
        for status in sorted(codes)
    }
