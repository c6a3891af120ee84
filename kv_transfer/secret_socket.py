"""A UNIX socket that lets in one peer: of the same user, and who has read the rendezvous."""

import hmac
import os
import socket
import struct
import time
from collections.abc import Callable

from kv_transfer.backend import LinkBrokenError, LinkTimeoutError

SECRET_BYTES = 32
# How long one caller may take to show the secret; the others wait behind it.
_SECRET_TIMEOUT_S = 0.2
# How soon the prefill side notices that it waits for nobody any more.
_ACCEPT_POLL_S = 0.2
_CREDENTIALS = struct.Struct("iII")  # struct ucred: pid, uid, gid


def listen(name: bytes) -> socket.socket:
    """Listen under a name that is hard to guess."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(address_of(name))
        listener.listen()
        listener.settimeout(_ACCEPT_POLL_S)
    except BaseException:
        listener.close()
        raise
    return listener


def address_of(name: bytes) -> str:
    """The name of a socket: with a zero in front it is in no file system and dies with it."""
    return f"\0relevo-{name.hex()}"


def accept_peer(
    listener: socket.socket, secret: bytes, deadline: float, is_aborted: Callable[[], bool]
) -> socket.socket:
    """Wait for the peer; whoever else comes is sent away."""
    while time.monotonic() < deadline:
        if is_aborted():
            raise LinkBrokenError("the link was aborted")
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            continue
        if _is_peer(connection, secret):
            return connection
        connection.close()
    raise LinkTimeoutError("the decode worker did not come for the shared memory")


def _is_peer(connection: socket.socket, secret: bytes) -> bool:
    try:
        connection.settimeout(_SECRET_TIMEOUT_S)
        if user_of(connection) != os.geteuid():
            return False
        return hmac.compare_digest(connection.recv(SECRET_BYTES, socket.MSG_WAITALL), secret)
    except OSError:
        return False


def user_of(connection: socket.socket) -> int:
    """The user of the process at the other end, as the kernel has it."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    user_id: int = _CREDENTIALS.unpack(credentials)[1]
    return user_id
