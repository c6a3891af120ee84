"""grpc.health.v1, always as true as the router: nothing is copied that could grow stale."""

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]

# A watcher learns of a change this late at most.
WATCH_INTERVAL_S = 0.2

_Response = health_pb2.HealthCheckResponse


class HealthService(health_pb2_grpc.HealthServicer):
    """Answers for the whole server and for each of its services."""

    def __init__(self, is_ready: Callable[[], bool], *, services: frozenset[str]) -> None:
        self._is_ready = is_ready
        self._services = services | {""}

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Context) -> _Response:  # noqa: N802
        """Return the state now; NOT_FOUND for a service that is not ours."""
        if request.service not in self._services:
            await context.abort(grpc.StatusCode.NOT_FOUND, "unknown service")
        return _Response(status=self._status(request.service))

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Context) -> None:  # noqa: N802
        """Send the state now and whenever it changes."""
        last = None
        while True:
            status = self._status(request.service)
            if status != last:
                await context.write(_Response(status=status))
                last = status
            await asyncio.sleep(WATCH_INTERVAL_S)

    def _status(self, service: str) -> _Response.ServingStatus:
        if service not in self._services:
            return _Response.SERVICE_UNKNOWN
        return _Response.SERVING if self._is_ready() else _Response.NOT_SERVING
