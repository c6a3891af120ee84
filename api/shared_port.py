"""A port that several ingresses of one machine listen on: who else does, and how to leave it.

With SO_REUSEPORT the kernel deals new connections out among a port's listeners. A connection is
its listener's from the first packet on; where that closes, whatever it has not accepted is reset.
So who leaves has the kernel drop what asks for a connection, without a word: the client's kernel
asks again a second later, when another listener is found. What had begun is accepted meanwhile.
"""

import asyncio
import contextlib
import ctypes
import logging
import os
import socket
import struct
import sys
from collections.abc import Callable, Iterator, Set
from typing import Any

import psutil

SETTLE_S = 0.25  # the end of a connection's handshake is under way for so long
_ACCEPT_WITHIN_S = 2.0

# A filter of the TCP header (classic BPF: code, jump if true, if false, operand).
_DROP_FIRST_PACKETS = (
    (0x30, 0, 0, 13),  # load the byte of flags
    (0x54, 0, 0, 0x12),  # keep SYN and ACK
    (0x15, 0, 1, 0x02),  # SYN alone?
    (0x06, 0, 0, 0),  # then drop it
    (0x06, 0, 0, 0xFFFFFFFF),  # else take it
)
_SO_ATTACH_FILTER = 26  # not among the constants of `socket`
_TCP_INFO_NUM_WAITING = 24  # offset of tcpi_unacked: of a listener, how many wait to be accepted

_LOGGER = logging.getLogger(__name__)


def is_shared(host: str, port: int, find_siblings: Callable[[], Set[int]]) -> bool:
    """Tell whether siblings listen there already; OSError where anybody else does.

    The kernel lets in whoever is of our user and asks for it, our own siblings or not.
    """
    if sys.platform != "linux":
        raise OSError("Ports can be shared on Linux only: set ingress.max_per_node to 1")
    everyone: list[Any] = psutil.net_connections("tcp")
    listeners = {
        connection.pid
        for connection in everyone
        if _is_listener(connection, port) and _overlap(connection.laddr.ip, host)
    }
    # Asked only now: each is known before it listens.
    siblings = find_siblings()
    for pid in listeners - siblings:
        raise OSError(f"Got {port = } but it is taken by {_name(pid)}")
    return bool(listeners)


async def turn_away(*ports: int) -> None:
    """Let no new connection come to this process's listeners; those that had begun are accepted.

    Whoever listens may then stop to. What it cannot save: a client further than SETTLE_S away that
    had just begun, unless net.ipv4.tcp_migrate_req is set.
    """
    code = b"".join(struct.pack("HBBI", *step) for step in _DROP_FIRST_PACKETS)
    buffer = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("HP", len(_DROP_FIRST_PACKETS), ctypes.addressof(buffer))
    with contextlib.ExitStack() as stack:
        listeners = [stack.enter_context(each) for each in own_listeners(*ports)]
        for listener in listeners:
            try:
                listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)
            except OSError as error:
                _LOGGER.warning("Connections that begin now may be reset: %s", error)
        await asyncio.sleep(SETTLE_S)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_ACCEPT_WITHIN_S):
                while any(_num_waiting(listener) for listener in listeners):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)


def own_listeners(*ports: int) -> Iterator[socket.socket]:
    """The sockets on which this process listens, whoever opened them; the caller closes them."""
    for connection in psutil.Process().net_connections("tcp"):
        if _is_listener(connection, *ports):
            yield socket.socket(fileno=os.dup(connection.fd))


def num_connections(*ports: int) -> int:
    """How many connections clients have to these ports of this process."""
    return sum(
        connection.status != psutil.CONN_LISTEN and _port(connection) in ports
        for connection in psutil.Process().net_connections("tcp")
    )


def _is_listener(connection: Any, *ports: int) -> bool:
    return connection.status == psutil.CONN_LISTEN and _port(connection) in ports


def _port(connection: Any) -> int:
    return int(connection.laddr.port) if connection.laddr else 0  # none: not bound yet


def _num_waiting(listener: socket.socket) -> int:
    info = listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_NUM_WAITING + 4)
    (num_waiting,) = struct.unpack_from("I", info, _TCP_INFO_NUM_WAITING)
    return int(num_waiting)


def _overlap(address: str, host: str) -> bool:
    anywhere = {"0.0.0.0", "::"}
    return bool({address, host} & anywhere) or address in {
        found[4][0] for found in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    }


def _name(pid: int | None) -> str:
    if pid is None:
        return "a process of somebody else"
    try:
        return f"process {pid} ({psutil.Process(pid).name()})"
    except psutil.NoSuchProcess:
        return f"process {pid}"
