"""HTTP routes that say what is served and how it is."""

from datetime import UTC, datetime

import orjson
from starlette.requests import Request
from starlette.responses import Response

from api.build import this_build
from api.caller import Caller
from api.errors import ApiError, Verdict, invalid, show
from api.operations.metrics_page import CONTENT_TYPE, metrics_page
from api.serving import NOT_READY_RETRY_AFTER_S, Serving
from api.worker_loads import load_to_dict
from telemetry.prometheus_sink import PrometheusSink

MAX_ROUTES = 1000


class InformationRoutes:
    """Read-only views of the ingress and its workers."""

    def __init__(self, serving: Serving, sink: PrometheusSink) -> None:
        self._serving = serving
        self._sink = sink
        self._build = this_build()

    async def health(self, _: Request) -> Response:
        """Say that this process answers."""
        return _json({"status": "ok"})

    async def ready(self, _: Request) -> Response:
        """Say whether a request sent now would be served."""
        if self._serving.is_ready():
            return _json({"status": "ready"})
        response = _json({"status": "unavailable"}, status=503)
        response.headers["retry-after"] = str(round(NOT_READY_RETRY_AFTER_S))
        return response

    async def version(self, _: Request) -> Response:
        """Return which code, configuration and model serve, each by what it holds."""
        model = self._serving.model_config
        return _json(
            {
                "version": self._build.version,
                "commit": self._build.commit or None,
                "build": self._build.digest,
                "config": self._serving.config_digest or None,
                "model": model.model_id,
                "revision": model.revision,
            }
        )

    async def metrics(self, _: Request) -> Response:
        """Return the Prometheus page of this ingress and all workers."""
        page = metrics_page(self._sink, self._serving.upstream.loads())
        return Response(page, headers={"content-type": CONTENT_TYPE})

    async def status(self, request: Request) -> Response:
        """Return the state of the cluster; `?routes=N` adds the last routing decisions.

        Who is no operator sees its own of these, and of the cluster whether it serves.
        """
        text = request.query_params.get("routes", "0")
        if not (text.isascii() and text.isdecimal() and len(text) < 6):
            raise invalid(f"routes must be a number from 0 to {MAX_ROUTES}", "routes")
        caller: Caller = request.state.caller
        num_routes = min(int(text), MAX_ROUTES)
        status = self._serving.upstream.status(num_routes, tenant=caller.sees_tenant)
        if not caller.is_operator:
            status |= {"reasons": [], "workers": []}
        return _json(status)

    async def loads(self, _: Request) -> Response:
        """Return the load of every live worker."""
        workers = [load_to_dict(report) for report in self._serving.upstream.loads()]
        return _json({"version": self._build.version, "workers": workers})

    async def models(self, _: Request) -> Response:
        """List the one model, for the clients of both APIs in one."""
        card = self._model_card()
        page = {"has_more": False, "first_id": card["id"], "last_id": card["id"]}
        return _json({"object": "list", "data": [card], **page})

    async def model(self, request: Request) -> Response:
        """Return the one model by its name."""
        name = request.path_params["model"]
        if name != self._serving.model_config.model_id:
            raise ApiError(
                Verdict.MODEL_NOT_FOUND, f"The model {show(name)} does not exist", param="model"
            )
        return _json(self._model_card())

    def _model_card(self) -> dict[str, object]:
        config = self._serving.model_config
        info = self._serving.upstream.model
        return {
            "id": config.model_id,
            "object": "model",
            "created": config.created,
            "owned_by": "relevo",
            "root": config.model_id,
            "parent": None,
            "max_model_len": None if info is None else info.max_model_len,
            # What Anthropic's clients look for.
            "type": "model",
            "display_name": config.model_id,
            "created_at": datetime.fromtimestamp(config.created, UTC).isoformat(),
        }


def _json(value: object, *, status: int = 200) -> Response:
    return Response(orjson.dumps(value), status_code=status, media_type="application/json")
