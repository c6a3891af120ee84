"""The two processes of the GPU checks, over Gloo: what they do there must at least work here."""

import pytest

from bench.link_pair import LinkPair


def test_links_of_two_processes_are_made_used_aborted_and_made_again() -> None:
    pair = LinkPair(("cpu", "cpu"), ({"NCCL_HOSTID": "first"}, {"NCCL_HOSTID": "second"}))
    try:
        assert pair.sender.do("missing_settings") == []
        for generation in ("a", "b"):
            assert pair.build(generation, backend="gloo") > 0
            pair.move(generation, 1 << 16, value=3)
            pair.receiver.do("post_receive", generation, 16)
            assert max(pair.abort(generation)) < 5.0
        with pytest.raises(RuntimeError, match="KeyError"):
            pair.sender.do("send", "a", 1)
    finally:
        pair.close()
