"""Shared memory as a link's channel: the decode worker reads the prefill worker's pool itself.

    prefill                                  decode
    listens on an abstract socket            learns its name and a secret over the rendezvous
    checks user and secret              <--  connects
    descriptor of the pool              -->  maps it, read-only
    waits                               <--  gives back each range it was lent, once it is copied
                                        <--  closes, once nothing is mapped: all is given back

What is lent, and where it lies, is said in the reply to a fetch.

The socket has no name in any file system, and whoever is left when the other process dies reads
its end. What the prefill worker has lent is read no more when it was given back or when the
socket's end was read: the kernel closes it after the memory of a dead process is gone, and the
decode side closes it after it has let the mapping go.
"""

import asyncio
import fcntl
import mmap
import os
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kv_transfer.backend import LinkBrokenError, LinkTimeoutError
from kv_transfer.layout import KVLayout
from kv_transfer.secret_socket import SECRET_BYTES, accept_peer, address_of, listen, user_of
from kv_transfer.store import RendezvousStore

# Bytes as they lie.
Pages = npt.NDArray[np.uint8]

_STORE_KEY = "shared_memory"
_NAME_BYTES = 16
_PROBE_BYTES = 4 << 20
_NUM_BYTES = struct.Struct("<Q")
_GIVEN_BACK = b"."
_PROBED = b"?"


class SharedMemoryUnavailableError(LinkBrokenError):
    """The two processes cannot share memory after all; another backend may do."""


@dataclass(frozen=True, slots=True)
class SharedPool:
    """Memory a prefill worker lets its peers map."""

    descriptor: int
    num_bytes: int


class SharedMemoryChannel:
    """One end of one link; the verbs but `abort` belong to the link's thread.

    Invariant: what `connection` says (bytes, then its end) is true of the mapping: see above.
    """

    def __init__(self, connection: socket.socket, memory: Pages | None) -> None:
        # the peer's pool [num_bytes]; None on the prefill side
        self.memory = memory
        self._rows: Pages | None = None
        self._connection = connection
        self._is_reader = memory is not None
        self._wakeup = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        # what is waited for is often there already: a socket with a timeout would ask for it first
        connection.setblocking(False)
        self._poll = select.poll()
        self._poll.register(self._wakeup, select.POLLIN)
        self._is_aborted = False
        self._closing = threading.Lock()
        self._is_closed = False

    @classmethod
    def serve(
        cls,
        store: RendezvousStore,
        pool: SharedPool,
        *,
        timeout_s: float,
        is_aborted: Callable[[], bool],
    ) -> "SharedMemoryChannel":
        """Let the one peer that has read the rendezvous map the pool."""
        name, secret = secrets.token_bytes(_NAME_BYTES), secrets.token_bytes(SECRET_BYTES)
        try:
            with listen(name) as listener:
                store.set(_STORE_KEY, name + secret)
                deadline = time.monotonic() + timeout_s
                connection = accept_peer(listener, secret, deadline, is_aborted)
        except OSError as error:
            raise _explain(error) from error
        try:
            connection.settimeout(timeout_s)
            socket.send_fds(connection, [_NUM_BYTES.pack(pool.num_bytes)], [pool.descriptor])
        except OSError as error:
            connection.close()
            raise _explain(error) from error
        return cls(connection, None)

    @classmethod
    def join(cls, store: RendezvousStore, *, timeout_s: float) -> "SharedMemoryChannel":
        """Map the pool of the peer; SharedMemoryUnavailableError when it is out of reach."""
        told = store.get(_STORE_KEY)
        name, secret = told[:_NAME_BYTES], told[_NAME_BYTES:]
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(timeout_s)
        try:
            connection.connect(address_of(name))
            if user_of(connection) != os.geteuid():
                raise SharedMemoryUnavailableError("the prefill worker is another user")
            connection.sendall(secret)
            head, descriptors, _, _ = socket.recv_fds(connection, _NUM_BYTES.size, 1)
            memory = _map(head, descriptors)
        except TimeoutError as error:
            connection.close()
            raise LinkTimeoutError("the prefill worker hands its memory over too late") from error
        except (OSError, ValueError) as error:
            connection.close()
            raise SharedMemoryUnavailableError(f"no shared memory: {error}") from error
        except BaseException:
            connection.close()
            raise
        return cls(connection, memory)

    def probe(self, timeout_s: float) -> float:
        """Read some of the memory once all the way round; return the bytes per second seen."""
        if self.memory is None:
            self._send(_PROBED, time.monotonic() + timeout_s)
            self.wait_given_back(timeout_s)
            return 0.0
        self._receive(len(_PROBED), time.monotonic() + timeout_s)
        pages = self.memory[:_PROBE_BYTES]
        copy = pages.copy()  # pays for the pages
        started = time.monotonic()
        np.copyto(copy, pages)
        elapsed_s = time.monotonic() - started
        self.give_back(timeout_s)
        return len(pages) / max(elapsed_s, 1e-9)

    def rows(self, theirs: KVLayout) -> Pages:
        """Decode side: the peer's pool [num_blocks, rows, bytes]; nobody shall keep it."""
        if self._rows is None:
            assert self.memory is not None, "only the decode side reads"
            num_blocks = len(self.memory) // theirs.bytes_per_block
            whole = self.memory[: num_blocks * theirs.bytes_per_block]
            self._rows = whole.reshape(num_blocks, theirs.rows_per_block, theirs.bytes_per_row)
        return self._rows

    def wait_given_back(self, timeout_s: float) -> None:
        """Prefill side: block until the peer has read the next range of those it was lent."""
        self._receive(len(_GIVEN_BACK), time.monotonic() + timeout_s)

    def give_back(self, timeout_s: float) -> None:
        """Decode side: say that the range was read."""
        self._send(_GIVEN_BACK, time.monotonic() + timeout_s)

    def abort(self) -> None:
        """Make every verb raise, here at once, at the peer when it next listens; any thread."""
        with self._closing:
            if self._is_closed:
                return
            self._is_aborted = True
            os.eventfd_write(self._wakeup, 1)
            if not self._is_reader:
                # One way only: the end of what the peer says is still to come.
                with suppress(OSError):
                    self._connection.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Let the mapping go, then say so by the end of the connection.

        On the prefill side the connection stays open, for `wait_unread`.
        """
        with self._closing:
            if self._is_closed:
                return
            self._is_closed = True
            os.close(self._wakeup)
        self.memory = self._rows = None
        if self._is_reader:
            self._connection.close()

    async def wait_unread(self) -> None:
        """Prefill side, after `close`: wait until the peer cannot read our memory any more."""
        loop = asyncio.get_running_loop()
        # A reset is an end, too.
        with self._connection, suppress(ConnectionError):
            while await loop.sock_recv(self._connection, 4096):
                pass

    def _receive(self, num_bytes: int, deadline: float) -> bytes:
        received = b""
        while len(received) < num_bytes:
            self._check_alive()
            try:
                part = self._connection.recv(num_bytes - len(received))
            except BlockingIOError:
                self._wait_for(select.POLLIN, deadline)
                continue
            except OSError as error:
                raise _explain(error) from error
            if not part:
                raise LinkBrokenError("the peer closed the shared memory link")
            received += part
        return received

    def _send(self, message: bytes, deadline: float) -> None:
        while message:
            self._check_alive()
            try:
                message = message[self._connection.send(message) :]
            except BlockingIOError:
                self._wait_for(select.POLLOUT, deadline)
            except OSError as error:
                raise _explain(error) from error

    def _check_alive(self) -> None:
        if self._is_aborted:
            raise LinkBrokenError("the link was aborted")

    def _wait_for(self, event: int, deadline: float) -> None:
        self._poll.register(self._connection, event)
        if not self._poll.poll(max(deadline - time.monotonic(), 0.001) * 1000):
            raise LinkTimeoutError("the peer did not answer in time over shared memory")


def _map(head: bytes, descriptors: Sequence[int]) -> Pages:
    """Map the peer's pool, in pages nobody can write through it."""
    try:
        if len(head) != _NUM_BYTES.size or len(descriptors) != 1:
            raise LinkBrokenError("the prefill worker closed before it handed its memory over")
        (num_bytes,) = _NUM_BYTES.unpack(head)
        if not fcntl.fcntl(descriptors[0], fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            # Reading pages that are gone ends the process.
            raise SharedMemoryUnavailableError("the peer's memory could shrink")
        mapping = mmap.mmap(descriptors[0], num_bytes, prot=mmap.PROT_READ)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    return np.frombuffer(mapping, dtype=np.uint8)


def _explain(error: OSError) -> LinkBrokenError:
    if isinstance(error, TimeoutError):
        return LinkTimeoutError("the peer did not answer in time over shared memory")
    return LinkBrokenError(f"shared memory link: {error}")
