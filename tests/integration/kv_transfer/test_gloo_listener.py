"""A connected Gloo pair takes no stranger in: each would keep a descriptor for good."""

import os
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
import torch
from torch._C._distributed_c10d import HashStore

from kv_transfer.gloo_channel import GlooChannel


def listening_ports() -> set[int]:
    connections = psutil.Process().net_connections(kind="tcp")
    return {each.laddr.port for each in connections if each.status == psutil.CONN_LISTEN}


@pytest.fixture
def channels() -> Iterator[list[GlooChannel]]:
    store = HashStore()

    def make(rank: int) -> GlooChannel:
        return GlooChannel(store, rank=rank, group_name="pair", interface="", timeout_s=5.0)

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
    channels[0].send(sent).wait(5.0)
    receiving.wait(5.0)
    assert torch.equal(sent, received)
