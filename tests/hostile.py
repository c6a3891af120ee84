"""A stranger who knocks at a port with everything there is."""

import asyncio
import contextlib
import os
import pickle
import socket
import ssl
from collections.abc import Iterable
from pathlib import Path

import psutil

NUM_IDLE = 200
NUM_PORTS_AT_ONCE = 8


class Touch:
    """A pickle that makes a file where it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.path,)


def listening(processes: list[psutil.Process]) -> dict[int, str]:
    """Port -> address of every TCP listener of these processes."""
    return {
        connection.laddr.port: connection.laddr.ip.removeprefix("::ffff:")
        for process in processes
        for connection in process.net_connections(kind="tcp")
        if connection.status == psutil.CONN_LISTEN
    }


def messages(touched: Path) -> list[bytes]:
    """What is said to a port, each on a connection of its own."""
    evil = pickle.dumps(Touch(touched))
    hello = _client_hello()
    return [
        os.urandom(64 * 1024),
        b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET / HTTP/1.0\r\n",  # half a request, and then nothing
        hello,
        hello[: len(hello) // 2],
        evil,
        len(evil).to_bytes(4, "big") + evil,
        len(evil).to_bytes(8, "little") + evil,
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + os.urandom(1024),
        (2**63 - 1).to_bytes(8, "little") + b"x" * 100,
    ]


async def knock(ports: Iterable[int], touched: Path) -> None:
    """Say all of it to each port, a few ports at a time."""
    slots = asyncio.Semaphore(NUM_PORTS_AT_ONCE)

    async def knock_at(port: int) -> None:
        async with slots:
            await asyncio.to_thread(_knock, port, touched)

    await asyncio.gather(*map(knock_at, ports))


def _knock(port: int, touched: Path) -> None:
    """Say all of it while many connections stand idle; refusals are fine."""
    idle = []
    while len(idle) < NUM_IDLE and (connection := _connect(port)) is not None:
        idle.append(connection)
    try:
        for message in messages(touched):
            _say(port, message)
    finally:
        for each in idle:
            each.close()


def _connect(port: int) -> socket.socket | None:
    try:
        return socket.create_connection(("127.0.0.1", port), timeout=0.1)
    except OSError:
        return None


def _say(port: int, message: bytes) -> None:
    connection = _connect(port)
    if connection is None:
        return
    with connection:
        connection.settimeout(0.1)
        try:
            connection.sendall(message)
            while connection.recv(1 << 16):
                pass
        except OSError:
            return


def _client_hello() -> bytes:
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    context = ssl.create_default_context()
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(incoming, outgoing, server_hostname="localhost").do_handshake()
    return outgoing.read()
