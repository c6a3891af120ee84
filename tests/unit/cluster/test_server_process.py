"""Ports for servers that are started later."""

import socket
from pathlib import Path

import pytest

from cluster.server_process import free_ports

HANDED_OUT = Path("/proc/sys/net/ipv4/ip_local_port_range")


def test_free_ports_are_free_and_nobody_gets_them_unasked() -> None:
    ports = free_ports(20)
    assert len(set(ports)) == 20
    first, last = map(int, HANDED_OUT.read_text().split())
    for port in ports:
        assert not first <= port <= last
        socket.create_server(("127.0.0.1", port)).close()


def test_a_port_that_is_taken_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    taken, free = free_ports(2)
    monkeypatch.setattr("cluster.server_process.PORTS", [taken, free])
    with socket.create_server(("127.0.0.1", taken)):
        assert free_ports(2) == [free]
