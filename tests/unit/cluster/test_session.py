"""A session whose Ray does not start says so in one line."""

from pathlib import Path
from typing import Any

import pytest

from cluster.config import load_config
from cluster.session import Session
from cluster.start_error import StartError


def test_a_ray_that_does_not_start_is_one_clear_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def time_out(**_: Any) -> None:
        raise Exception("The current node timed out during startup.\nMore of Ray's own words.")

    monkeypatch.setattr("ray.init", time_out)
    said: list[tuple[str, str]] = []
    session = Session(
        load_config(environ={}),
        run_directory=tmp_path,
        say=lambda phase, text: said.append((phase, text)),
    )
    with pytest.raises(StartError) as failed:
        session.connect()
    assert "timed out during startup" in str(failed.value)
    assert "\n" not in str(failed.value)
    assert said == [("ray", "starting")]
    assert not session.has_deployed
