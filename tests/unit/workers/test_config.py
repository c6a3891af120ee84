"""What a worker's configuration takes and refuses."""

import pytest

from workers.config import WorkerConfig

PLAIN = {
    "engine": {"model_path": "/model", "max_num_seqs": 3},
    "rpc": {"tls": {"certificate_file": "a", "private_key_file": "b", "ca_file": "c"}},
    "token_file": "/token",
}


def test_plain_data_makes_the_round_trip() -> None:
    config = WorkerConfig.from_dict(PLAIN)
    assert config.rpc.tls.ca_file == "c"
    assert config.max_waiting == 12
    assert WorkerConfig.from_dict(config.to_dict()) == config


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
def test_what_no_worker_can_run_with_is_refused(change) -> None:
    with pytest.raises(ValueError, match="Got"):
        WorkerConfig.from_dict({**PLAIN, **change})
