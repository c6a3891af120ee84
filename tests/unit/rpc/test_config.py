"""Settings and descriptions as plain data."""

import json
import os
import time

import pytest

from rpc.config import RpcConfig, TlsConfig
from rpc.description import WorkerDescription, process_incarnation

TLS = TlsConfig(certificate_file="c.pem", private_key_file="k.pem", ca_file="ca.pem")


@pytest.mark.parametrize(
    "config", [RpcConfig(), RpcConfig(port_range="7000-7003"), RpcConfig(tls=TLS)]
)
def test_settings_survive_json(config):
    assert RpcConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_ports_are_tried_from_low_to_high_and_any_when_none_is_named():
    assert list(RpcConfig(port_range="7000-7002").ports()) == [7000, 7001, 7002]
    assert list(RpcConfig().ports()) == [0]


@pytest.mark.parametrize(
    "port_range", ["7000", "7000-", "-7000", "7001-7000", "0-5", "1-65536", "a-b", "7000-7001-2"]
)
def test_a_malformed_range_is_refused(port_range):
    with pytest.raises(ValueError, match="port_range"):
        RpcConfig(port_range=port_range)


def test_half_a_tls_configuration_is_refused():
    with pytest.raises(ValueError, match="ca_file"):
        TlsConfig(certificate_file="c.pem", private_key_file="k.pem", ca_file="")


def test_a_description_survives_json_and_becomes_messages():
    description = WorkerDescription(
        worker_id="decode-1",
        pool="decode",
        incarnation=1_790_000_000_000_000,
        address="127.0.0.1:7001",
        node_id="n",
        pid=7,
    )
    copy = WorkerDescription.from_dict(json.loads(json.dumps(description.to_dict())))
    assert copy == description
    peer = description.to_peer()
    assert peer.worker == description.to_ref()
    assert (peer.worker.worker_id, peer.worker.incarnation) == ("decode-1", 1_790_000_000_000_000)
    assert (peer.address, peer.node_id) == ("127.0.0.1:7001", "n")


def test_the_incarnation_is_the_start_of_this_process():
    assert process_incarnation() == process_incarnation()
    assert 0 <= time.time() - process_incarnation() / 1e6 < os.times().elapsed
