"""Finds the socket a library listens on and lets nobody in any more.

Gloo goes on listening after its pair is connected. It never closes a connection that said nothing
it understands, and when the process has no descriptors left its `accept` ends the process: every
stranger would cost one descriptor, and enough of them the worker.
"""

import contextlib
import ctypes
import os
import socket
import struct
import threading
from collections.abc import Callable
from typing import TypeVar

MadeT = TypeVar("MadeT")
# host and port
Address = tuple[str, int]

_SO_ATTACH_FILTER = 26  # Linux; Python has no name for it
_RETURN = 0x06  # a program of this one instruction keeps 0 bytes of each packet: it drops them all

# One at a time, so that what is new was made here.
_making = threading.Lock()


class Listener:
    """Our own handle of a socket that somebody else owns; None when it cannot be told which."""

    def __init__(self, handle: socket.socket | None) -> None:
        self._handle = handle
        # where it listens; None when it cannot be told
        self.address: Address | None = handle.getsockname()[:2] if handle else None

    def shut(self) -> None:
        """Drop whatever still comes; connections that were accepted go on. Idempotent."""
        handle, self._handle = self._handle, None
        if handle is None:
            return
        # HBBI: code, jump if true, jump if false, operand
        program = ctypes.create_string_buffer(struct.pack("HBBI", _RETURN, 0, 0, 0))
        # Where this is no Linux it stays open, as the library meant it.
        with handle, contextlib.suppress(OSError):
            handle.setsockopt(
                socket.SOL_SOCKET,
                _SO_ATTACH_FILTER,
                struct.pack("HP", 1, ctypes.addressof(program)),
            )


def with_listener(make: Callable[[], MadeT]) -> tuple[MadeT, Listener]:
    """Call what opens one listening socket; return its result, and that socket."""
    with _making:
        before = _listening()
        made = make()
        now = _listening()
        new = [number for inode, number in now.items() if inode not in before]
        return made, Listener(_handle_of(new[0]) if len(new) == 1 else None)


def connections_between(ours: Address, theirs: Address) -> list[tuple[Address, Address]]:
    """(local, remote) of each connection of this process that came to `ours` or went to `theirs`.

    One that came has our listener's own address at its near end. A socket has several descriptors
    while another link of this process looks, too: its two addresses are what counts it once.
    """
    found = set()
    for name in _descriptors():
        handle = _handle_of(int(name))
        if handle is None:
            continue
        with handle:
            try:
                local, remote = handle.getsockname()[:2], handle.getpeername()[:2]
            except OSError:
                continue  # it is not connected
        if local == ours or remote == theirs:
            found.add((local, remote))
    return sorted(found)


def _listening() -> dict[int, int]:
    """Inode of each listening socket of this process -> its descriptor, which may be used again."""
    listening = {}
    for name in _descriptors():
        handle = _handle_of(int(name))
        if handle is None:
            continue
        with handle:
            if handle.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                listening[os.fstat(handle.fileno()).st_ino] = int(name)
    return listening


def _descriptors() -> list[str]:
    try:
        return os.listdir("/proc/self/fd")
    except OSError:
        return []


def _handle_of(number: int) -> socket.socket | None:
    """A second descriptor of a socket; None when it is none, or none any more."""
    try:
        copy = os.dup(number)
    except OSError:
        return None
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        return None
