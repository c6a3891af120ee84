"""HTTP routes that show what became of one request."""

import orjson
from starlette.requests import Request
from starlette.responses import Response

from api.errors import ApiError, Verdict, show
from telemetry.trace_store import TraceStore
from telemetry.trace_view import describe_trace


class TraceRoutes:
    """Read-only views of the last requests of this ingress."""

    def __init__(self, traces: TraceStore) -> None:
        self._traces = traces

    async def trace(self, request: Request) -> Response:
        """Return the spans of one request: by its id, its label or its trace id.

        Another tenant's is not there, but to an operator.
        """
        name = request.path_params["name"]
        found = self._traces.find(name, tenant=request.state.caller.sees_tenant)
        if found is None:
            raise ApiError(
                Verdict.ROUTE_NOT_FOUND,
                f"Of the last requests of this ingress none is called {show(name)}",
            )
        return Response(orjson.dumps(describe_trace(found)), media_type="application/json")
