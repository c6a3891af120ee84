"""A connected Gloo pair takes no stranger in: each would keep a descriptor for good."""

import os
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
import torch
from torch._C._distributed_c10d import HashStore

from kv_transfer.backend import LinkBrokenError
from kv_transfer.gloo_channel import GlooChannel
from kv_transfer.listeners import connections_between


def listening_ports() -> set[int]:
    connections = psutil.Process().net_connections(kind="tcp")
    return {each.laddr.port for each in connections if each.status == psutil.CONN_LISTEN}


def make_channel(store: HashStore, rank: int, *, interface: str = "") -> GlooChannel:
    return GlooChannel(store, rank=rank, group_name="pair", interface=interface, timeout_s=5.0)


@pytest.fixture(params=["", "lo"], ids=["loopback", "interface"])
def channels(request: pytest.FixtureRequest) -> Iterator[list[GlooChannel]]:
    store = HashStore()

    def make(rank: int) -> GlooChannel:
        return make_channel(store, rank, interface=request.param)

    with ThreadPoolExecutor(2) as threads:
        made = list(threads.map(make, (0, 1)))
    yield made
    for channel in made:
        channel.close()


def test_strangers_get_no_connection_and_the_pair_goes_on(channels: list[GlooChannel]) -> None:
    ports = listening_ports()
    assert ports, "Gloo's listeners are gone: then kv_transfer.listeners is not needed any more"
    num_descriptors = len(os.listdir("/proc/self/fd"))
    for port in ports:
        with pytest.raises(TimeoutError):
            socket.create_connection(("127.0.0.1", port), timeout=0.2)
    assert len(os.listdir("/proc/self/fd")) == num_descriptors

    sent, received = torch.arange(1 << 20), torch.zeros(1 << 20, dtype=torch.int64)
    receiving = channels[1].receive(received)
    channels[0].send(sent).wait(20.0)
    receiving.wait(20.0)
    assert torch.equal(sent, received)


@pytest.mark.parametrize("guess", [b"", bytes(8)], ids=["silent", "guesses"])
def test_a_stranger_before_the_peer_costs_the_link(guess: bytes) -> None:
    """Whoever connects while the link is made is noticed, before a byte of KV is sent."""
    store, strangers = HashStore(), []
    before = listening_ports()
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(make_channel, store, 0)
        while not (ports := listening_ports() - before):
            time.sleep(0.001)
        for port in ports:
            stranger = socket.create_connection(("127.0.0.1", port), timeout=20.0)
            stranger.sendall(guess)
            strangers.append(stranger)
        second = threads.submit(make_channel, store, 1)
        errors = [each.exception(40.0) for each in (first, second)]
    assert all(isinstance(error, LinkBrokenError) for error in errors), errors
    for stranger in strangers:
        stranger.close()


def test_an_interface_that_is_not_there_breaks_the_link() -> None:
    with pytest.raises(LinkBrokenError, match="nowhere0"):
        make_channel(HashStore(), 0, interface="nowhere0")


def test_a_connection_with_two_descriptors_is_one() -> None:
    nowhere = ("127.0.0.1", 1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        with socket.create_connection(address) as ours, server.accept()[0] as theirs, theirs.dup():
            assert connections_between(address, nowhere) == [(address, ours.getsockname())]
