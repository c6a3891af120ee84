"""The door of the HTTP server: bounds, keys and labels, before any route is looked at."""

import base64
import logging
import math
import uuid
from collections.abc import Callable, Sequence

import orjson
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.api_keys import ApiKeys
from api.errors import ApiError, Verdict, to_api_error
from telemetry.logs import request_scope

MAX_HEADERS = 64
MAX_HEADER_BYTES = 32 * 1024
MAX_LABEL_CHARACTERS = 128
DASHBOARD = "/dashboard"  # it alone takes a browser's own way to send a key
BASIC = 'Basic realm="relevo: any user, the API key as password", charset="UTF-8"'
OPEN_PATHS = frozenset({"/health", "/ready"})
# What speaks of all tenants at once.
OPERATOR_PATHS = frozenset({DASHBOARD, "/metrics", "/v1/loads"})
# The API whose clients send their key, and want their errors, in another way.
ANTHROPIC_PATH = "/v1/messages"

_LOGGER = logging.getLogger(__name__)


class HttpGate:
    """Wraps the app. Invariant: each response has an x-request-id; only open paths need no key."""

    def __init__(
        self,
        app: ASGIApp,
        keys: ApiKeys,
        *,
        routes: Sequence[str],
        is_leaving: Callable[[], bool] = lambda: False,
    ) -> None:
        self.routes = tuple(routes)
        self._app = app
        self._keys = keys
        self._is_leaving = is_leaving

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request in or answer it here."""
        if scope["type"] != "http":
            return
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        label = read_label(_values(headers, b"x-request-id"))
        scope.setdefault("state", {})["request_label"] = label
        scope["app"] = (
            self._app
        )  # lets the router raise 404 and 405 instead of answering in plain text
        is_started = False

        async def send_labelled(message: Message) -> None:
            nonlocal is_started
            if message["type"] == "http.response.start":
                is_started = True
                message["headers"] = [*message["headers"], *_labels(scope["path"], label)]
                if self._is_leaving():
                    message["headers"].append((b"connection", b"close"))
            await send(message)

        with request_scope(label):
            try:
                self._check(scope, headers)
                await self._app(scope, receive, send_labelled)
            except Exception as error:
                if not is_started:
                    response = error_response(error, label, path=scope["path"])
                    if scope["path"] == DASHBOARD and response.status_code == 401:
                        # A browser asks its user then, and sends the answer with each request.
                        response.headers["www-authenticate"] = BASIC
                    await response(scope, receive, send_labelled)
                elif not isinstance(error, ApiError):
                    _LOGGER.exception("Response to %s was cut off", scope["path"])

    def _check(self, scope: Scope, headers: list[tuple[bytes, bytes]]) -> None:
        num_bytes = sum(len(name) + len(value) for name, value in headers)
        if len(headers) > MAX_HEADERS or num_bytes > MAX_HEADER_BYTES:
            raise ApiError(
                Verdict.HEADERS_TOO_LARGE,
                f"A request may have {MAX_HEADERS} headers of {MAX_HEADER_BYTES} bytes in all",
            )
        if scope["path"] not in OPEN_PATHS:
            authorizations = _credentials(scope["path"], headers)
            if scope["path"] == DASHBOARD:
                authorizations = [as_bearer(each) for each in authorizations]
            caller = self._keys.admit(
                authorizations, session_id="".join(_values(headers, b"x-session-id")[:1])
            )
            if scope["path"] in OPERATOR_PATHS:
                caller.check_operator()
            scope["state"]["caller"] = caller


def as_bearer(authorization: str) -> str:
    """Take a browser's password for the key; who the user is does not matter."""
    scheme, _, encoded = authorization.partition(" ")
    if scheme.lower() != "basic":
        return authorization
    try:
        decoded = base64.b64decode(encoded, validate=True).decode("utf-8", "surrogateescape")
    except ValueError:
        return authorization
    return f"Bearer {decoded.partition(':')[2]}"


def read_label(values: list[str]) -> str:
    """Take the client's label when it is short and printable, else make one."""
    label = values[0] if values else ""
    if 0 < len(label) <= MAX_LABEL_CHARACTERS and label.isascii() and label.isprintable():
        return label
    return uuid.uuid4().hex


def is_anthropic(path: str) -> bool:
    """Tell whether a path belongs to the Messages API."""
    return path == ANTHROPIC_PATH or path.startswith(f"{ANTHROPIC_PATH}/")


def error_response(error: Exception, request_id: str, *, path: str) -> Response:
    """Return the error body of the path's API with the status of the verdict."""
    verdict = to_api_error(error)
    if verdict.verdict is Verdict.FAILED:
        _LOGGER.error("Request failed", exc_info=error)
    headers = {}
    if verdict.retry_after_s is not None:
        headers["retry-after"] = str(max(1, math.ceil(verdict.retry_after_s)))
    if verdict.verdict is Verdict.UNAUTHENTICATED:
        headers["www-authenticate"] = "Bearer"
    write = verdict.to_anthropic if is_anthropic(path) else verdict.to_dict
    return Response(
        orjson.dumps(write(request_id)),
        status_code=verdict.face.http_status,
        headers=headers,
        media_type="application/json",
    )


def _credentials(path: str, headers: list[tuple[bytes, bytes]]) -> list[str]:
    """Authorization headers; Anthropic's clients send the key in one of its own."""
    given = _values(headers, b"authorization")
    if given or not is_anthropic(path):
        return given
    return [f"Bearer {key}" for key in _values(headers, b"x-api-key")]


def _labels(path: str, label: str) -> list[tuple[bytes, bytes]]:
    labels = [(b"x-request-id", label.encode())]
    return [*labels, (b"request-id", label.encode())] if is_anthropic(path) else labels


def _values(headers: list[tuple[bytes, bytes]], name: bytes) -> list[str]:
    return [value.decode("utf-8", "surrogateescape") for key, value in headers if key == name]
