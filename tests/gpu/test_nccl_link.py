"""NCCL links as far as one card can show them: two processes that pretend to be on two hosts.

Two ranks on one card are what NCCL refuses, unless the hosts look different; then the bytes travel
through the network path. Nothing but torch is needed here.
"""

import os
import signal
import time
from collections.abc import Iterator

import pytest
import torch

from bench.link_pair import LinkPair
from kv_transfer import nccl_channel

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.fixture
def pair() -> Iterator[LinkPair]:
    pair = LinkPair(("cuda:0", "cuda:0"), ({"NCCL_HOSTID": "first"}, {"NCCL_HOSTID": "second"}))
    yield pair
    pair.close()


def test_the_options_are_those_a_link_needs() -> None:
    options = nccl_channel._options("name", 4.5)
    assert options._timeout.total_seconds() == 4.5
    assert options.is_high_priority_stream
    assert options.config.blocking == 0
    assert options.config.min_ctas == 1
    assert options.config.max_ctas == nccl_channel.MAX_CTAS
    assert list(options.global_ranks_in_group) == [0, 1]
    assert options.group_name == "name"
    assert options.split_from is None


def test_two_ranks_share_a_card_and_move_bytes(pair: LinkPair) -> None:
    assert pair.sender.do("missing_settings") == []
    assert pair.build("a") > 0
    for num_bytes in (1, 1 << 16, 1 << 24):
        pair.move("a", num_bytes, value=7)
    pair.abort("a")
    # the next generation, after the abort of the one before
    pair.build("b")
    pair.move("b", 1 << 20, value=9)
    pair.abort("b")


def test_an_abort_returns_with_a_stopped_peer(pair: LinkPair) -> None:
    pair.build("a")
    pair.receiver.do("post_receive", "a", 1 << 20)
    os.kill(pair.sender.process.pid, signal.SIGSTOP)
    started = time.monotonic()
    assert pair.receiver.do("abort", "a") < 10.0
    assert time.monotonic() - started < 15.0
    assert pair.receiver.process.is_alive()
