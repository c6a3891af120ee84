"""The decode side of hand-overs: reserves blocks, fetches what is offered, waits for COMMIT."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

import torch

from kv_transfer.config import KVTransferConfig
from kv_transfer.control import FailureReason, TransferControl, TransferFailedError, WorkerRef
from kv_transfer.counters import TransferCounters
from kv_transfer.layout import KVLayout
from kv_transfer.receive_order import Received, ReceiveOrder, Reservation
from kv_transfer.reception import Reception, ReceptionSettings

__all__ = ["KVReceiver", "ReceiveOrder", "Received", "Reservation"]

logger = logging.getLogger(__name__)


class KVReceiver:
    """Receives the hand-overs of one decode worker; all methods are for the event loop."""

    def __init__(
        self,
        kv_cache_tensor: torch.Tensor,
        *,
        layout: KVLayout,
        worker: WorkerRef,
        config: KVTransferConfig,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = ReceptionSettings(
            pool=kv_cache_tensor, layout=layout, worker=worker, config=config, now=now
        )
        self._releases: set[asyncio.Task[None]] = set()
        self.num_active = 0
        self.counters = TransferCounters()

    async def receive(
        self,
        order: ReceiveOrder,
        control: TransferControl,
        reserve: Callable[[], Awaitable[Reservation]],
    ) -> Received:
        """Bring one request's KV into reserved blocks; only then may it be decoded.

        `reserve` is called once, at the first offer. The caller owns what it returned: when this
        returns, raises TransferFailedError or is cancelled, no block of it is touched any more. A
        commit whose choices all ended already comes back at once, without KV.
        """
        reception = Reception(self._settings, order, control, reserve)
        self.num_active += 1
        try:
            received = await reception.run()
        except TransferFailedError as error:
            self._count_failure(error.reason)
            logger.warning("transfer %d failed: %s", order.transfer_id, error)
            raise
        except asyncio.CancelledError:
            self._count_failure(FailureReason.CANCELLED)
            raise
        finally:
            self.num_active -= 1
            self._release(order, control)
        self.counters.num_bytes += received.num_bytes
        return received

    async def close(self) -> None:
        """Wait until the last Release calls are out."""
        await asyncio.gather(*self._releases, return_exceptions=True)

    def _count_failure(self, reason: FailureReason) -> None:
        self.counters.failures[reason] += 1
        if reason is FailureReason.DIGEST_MISMATCH:
            self.counters.digest_mismatches += 1

    def _release(self, order: ReceiveOrder, control: TransferControl) -> None:
        # in the background, also when the caller is being cancelled: the peer holds blocks for it
        task = asyncio.get_running_loop().create_task(self._tell_release(order, control))
        self._releases.add(task)
        task.add_done_callback(self._releases.discard)

    async def _tell_release(self, order: ReceiveOrder, control: TransferControl) -> None:
        try:
            async with asyncio.timeout(self._settings.config.transfer_timeout_s):
                await control.release(order.transfer_id, epoch=order.epoch)
        except Exception as error:  # noqa: BLE001 - the lease is there for whatever happens here
            logger.info("transfer %d: release not delivered: %s", order.transfer_id, error)
