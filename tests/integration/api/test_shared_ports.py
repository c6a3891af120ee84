"""Several ingresses on the ports of one machine: who may, how one leaves, what a dead one takes."""

import asyncio
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from api import shared_port
from api.config import IngressConfig
from cluster.server_process import free_ports
from tests.ingress_process import ANSWER, IngressProcess
from tests.steady_clients import steady_clients, wait_until_answered
from tests.tiny_tokenizer import write_tokenizer

GOES_ON_WITHIN_S = 20.0


@contextmanager
def listening(port: int = 0) -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", port), reuse_port=True) as listener:
        yield listener


def test_a_stranger_on_the_port_is_named() -> None:
    with listening() as stranger:
        port = stranger.getsockname()[1]
        with pytest.raises(OSError, match=rf"{port} but it is taken by process {os.getpid()} \("):
            shared_port.is_shared("127.0.0.1", port, frozenset)
        # On another address it is in nobody's way; a listener on all of them is.
        assert not shared_port.is_shared("127.0.0.2", port, frozenset)
        with pytest.raises(OSError, match="taken"):
            shared_port.is_shared("0.0.0.0", port, frozenset)


def test_siblings_are_no_strangers() -> None:
    with listening() as sibling:
        port = sibling.getsockname()[1]
        assert shared_port.is_shared("127.0.0.1", port, lambda: {os.getpid()})
    assert not shared_port.is_shared("127.0.0.1", port, frozenset)


async def test_who_turns_away_accepts_what_had_begun_and_nothing_new() -> None:
    with listening() as listener, socket.socket() as early, socket.socket() as late:
        address = listener.getsockname()
        early.connect(address)
        turning = asyncio.create_task(shared_port.turn_away(address[1]))
        await asyncio.sleep(0.05)
        late.setblocking(False)
        late.connect_ex(address)
        await asyncio.sleep(2 * shared_port.SETTLE_S)
        assert late.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1) == b"\x02"  # SYN_SENT
        assert not turning.done()  # one waits to be accepted
        accepted, _ = listener.accept()
        with accepted:
            await asyncio.wait_for(turning, 20)
            early.sendall(b"hello")
            assert accepted.recv(5) == b"hello"


@dataclass
class Fleet:
    """Ingresses on the same two ports; the ones that are up are the last ones."""

    folder: Path
    ports: tuple[int, int]
    members: list[IngressProcess] = field(default_factory=list)

    def start(self) -> IngressProcess:
        keys = {"http_port": self.ports[0], "grpc_port": self.ports[1], "shares_ports": True}
        settings = keys | {"drain_s": 4.0, "hand_over_s": 2.0}
        self.members.append(IngressProcess(self.folder, settings))
        return self.members[-1]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    http_port, grpc_port = free_ports(2)
    fleet = Fleet(write_tokenizer(tmp_path_factory.mktemp("fleet")), (http_port, grpc_port))
    try:
        for each in [fleet.start(), fleet.start()]:
            each.wait_until_up()
        yield fleet
    finally:
        for each in fleet.members:
            each.end(signal.SIGKILL)
            each.wait()


@pytest.mark.timeout(240)
def test_an_ingress_leaves_and_its_successor_comes_without_a_lost_request(fleet: Fleet) -> None:
    with steady_clients(fleet.ports) as clients:
        wait_until_answered(clients, times=5, within_s=GOES_ON_WITHIN_S)
        fleet.members[0].end()
        assert fleet.members[0].wait() == 0
        wait_until_answered(clients, times=5, within_s=GOES_ON_WITHIN_S)
        fleet.start().wait_until_up()
        wait_until_answered(clients, times=5, within_s=GOES_ON_WITHIN_S)
    for way, client in clients.items():
        assert client.failures == [], way
        assert set(client.texts) == {ANSWER}


@pytest.mark.timeout(240)
def test_a_killed_ingress_takes_its_own_streams_and_no_more(fleet: Fleet) -> None:
    with steady_clients(fleet.ports) as clients:
        wait_until_answered(clients, times=5, within_s=GOES_ON_WITHIN_S)
        fleet.members[-2].end(signal.SIGKILL)
        fleet.members[-2].wait()
        wait_until_answered(clients, times=5, within_s=GOES_ON_WITHIN_S)
    for way, client in clients.items():
        # A stream of its own, and a connection that was made while it died.
        assert len(client.failures) <= 2, (way, client.failures)


def test_a_hand_over_is_a_part_of_the_drain() -> None:
    with pytest.raises(ValueError, match="hand_over_s"):
        IngressConfig(drain_s=1.0, hand_over_s=2.0)
