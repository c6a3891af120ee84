"""The decode side of hand-overs: reserves blocks, fetches what is offered, waits for COMMIT."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

import torch

from kv_transfer.config import KVTransferConfig
from kv_transfer.control import FailureReason, TransferControl, TransferFailedError, WorkerRef
from kv_transfer.counters import ReceiverCounters
from kv_transfer.layout import KVLayout
from kv_transfer.pool_blocks import PoolBlocks
from kv_transfer.range_receiver import ReceptionSettings
from kv_transfer.receive_order import Received, ReceiveOrder, Reservation
from kv_transfer.reception import Reception

__all__ = ["KVReceiver", "ReceiveOrder", "Received", "Reservation"]

logger = logging.getLogger(__name__)

_FIRST_RELEASE_PAUSE_S = 0.1


class KVReceiver:
    """Receives the hand-overs of one decode worker; all methods are for the event loop.

    Invariant: each block that `give_back` names comes to `end_quarantine` as often as it was named.
    """

    def __init__(
        self,
        kv_cache_tensor: torch.Tensor,
        *,
        layout: KVLayout,
        worker: WorkerRef,
        config: KVTransferConfig,
        end_quarantine: Callable[[Sequence[int]], None],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = ReceptionSettings(
            pool=kv_cache_tensor,
            blocks=PoolBlocks(kv_cache_tensor, layout),
            layout=layout,
            worker=worker,
            config=config,
            end_quarantine=end_quarantine,
            now=now,
        )
        self._releases: set[asyncio.Task[None]] = set()
        self._is_closing = asyncio.Event()
        self.num_active = 0
        self.num_promised_tokens = 0  # of those that have no blocks yet
        self.counters = ReceiverCounters()

    async def receive(
        self,
        order: ReceiveOrder,
        control: TransferControl,
        reserve: Callable[[], Awaitable[Reservation]],
        give_back: Callable[[Sequence[int]], None],
    ) -> Received:
        """Bring one request's KV into reserved blocks; only then may it be decoded.

        `reserve` is called once, at the first offer. When this returns, no block of what it got is
        touched any more. When it raises TransferFailedError or is cancelled, `give_back` was called
        before, unless nothing was reserved: with the blocks that an operation under way may still
        write, and that must not be reused before `end_quarantine`. A commit whose choices all ended
        already comes back at once, without KV, and gives back what is under way, too.
        """
        promise = _Promise(self, order.num_tokens)

        async def reserve_promised() -> Reservation:
            reservation = await reserve()
            promise.keep()
            return reservation

        reception = Reception(self._settings, order, control, reserve_promised, give_back)
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
            promise.keep()
            self._release(order, control)
        self.counters.num_bytes += received.num_bytes
        return received

    async def close(self) -> None:
        """Wait until the last Release calls are out, each tried once more at the most."""
        self._is_closing.set()
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
        config, now = self._settings.config, self._settings.now
        deadline = now() + config.lease_s
        pause_s = _FIRST_RELEASE_PAUSE_S
        while True:
            try:
                async with asyncio.timeout(config.transfer_timeout_s):
                    await control.release(order.transfer_id, epoch=order.epoch)
                return
            except Exception as error:  # noqa: BLE001 - the lease is there for whatever happens here
                logger.info("transfer %d: release not delivered: %s", order.transfer_id, error)
            # by the deadline the lease has run out, or the peer is gone
            if self._is_closing.is_set() or now() + pause_s >= deadline:
                return
            await self._pause(pause_s)
            pause_s *= 2

    async def _pause(self, pause_s: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                await self._is_closing.wait()


class _Promise:
    """Tokens a hand-over will need blocks for, counted until it has them or ends."""

    def __init__(self, receiver: KVReceiver, num_tokens: int) -> None:
        self._receiver = receiver
        self._num_tokens = num_tokens
        receiver.num_promised_tokens += num_tokens

    def keep(self) -> None:
        """Count them no more."""
        self._receiver.num_promised_tokens -= self._num_tokens
        self._num_tokens = 0
