"""Both kinds of worker read the same keys."""

import pytest

from decode_workers.config import DecodeWorkerConfig
from prefill_workers.config import PrefillWorkerConfig

PLAIN = {
    "engine": {"model_path": "/model", "max_num_seqs": 3},
    "rpc": {"tls": {"certificate_file": "a", "private_key_file": "b", "ca_file": "c"}},
    "token_file": "/token",
}

BOTH = pytest.mark.parametrize("config_class", [PrefillWorkerConfig, DecodeWorkerConfig])


@BOTH
def test_plain_data_makes_the_round_trip(config_class) -> None:
    config = config_class.from_dict(PLAIN)
    assert config.rpc.tls.ca_file == "c"
    assert config.max_waiting == 12
    assert config_class.from_dict(config.to_dict()) == config


@BOTH
@pytest.mark.parametrize(
    "change",
    [
        {"token_file": ""},
        {"drain_s": -1},
        {"max_waiting_requests": 0},
        {"engine": {"model_path": "/model", "blok_size": 1}},
        {"kv_transfer": {"lease_s": 0}},
    ],
)
def test_what_no_worker_can_run_with_is_refused(config_class, change) -> None:
    with pytest.raises(ValueError, match="Got"):
        config_class.from_dict({**PLAIN, **change})
