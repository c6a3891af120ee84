"""The gRPC face of a worker's state feed."""

from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
from relevo.v1 import state_pb2, state_pb2_grpc

from rpc.state_feed import StateFeed


class WorkerService(state_pb2_grpc.WorkerServiceServicer):
    """Serves WatchState; the same in both pools."""

    def __init__(self, feed: StateFeed) -> None:
        self._feed = feed

    def WatchState(  # noqa: N802
        self,
        request: state_pb2.WatchStateRequest,  # noqa: ARG002
        context: grpc.aio.ServicerContext[Any, Any],  # noqa: ARG002
    ) -> AsyncIterator[state_pb2.WatchStateResponse]:
        """Stream snapshot, changes and load."""
        return self._feed.watch()
