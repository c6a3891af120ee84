import pickle
from dataclasses import fields
from typing import Any

import pytest

from router.config import RouterConfig
from router.errors import NoWorkers, QueueFull


def test_the_settings_are_these() -> None:
    assert [field.name for field in fields(RouterConfig)] == [
        "local_prefill",
        "max_waiting_requests",
        "request_timeout_s",
        "migration_limit",
    ]


@pytest.mark.parametrize(
    "facts",
    [
        {"local_prefill": "sometimes"},
        {"max_waiting_requests": -1},
        {"request_timeout_s": 0.0},
        {"migration_limit": -1},
    ],
)
def test_impossible_settings_are_refused(facts: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="Got"):
        RouterConfig(**facts)


@pytest.mark.parametrize("error", [QueueFull("full", 2.0), NoWorkers("none", 3.0)])
def test_errors_survive_a_process_border(error: QueueFull | NoWorkers) -> None:
    copy = pickle.loads(pickle.dumps(error))  # noqa: S301
    assert (str(copy), copy.retry_after_s) == (str(error), error.retry_after_s)
