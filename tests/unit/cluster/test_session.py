"""A session whose Ray does not start says so in one line."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve.schema import ApplicationStatus

from cluster.config import load_config
from cluster.releases import digest_of
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


ADDRESS = "cluster.ray_address=127.0.0.1:6379"
RUNNING: Any = SimpleNamespace(
    status=ApplicationStatus.RUNNING,
    deployments={"Ingress": SimpleNamespace(replica_states={"RUNNING": 1})},
)


def replacing(tmp_path: Path, *assignments: str, **arguments: Any) -> Session:
    config = load_config(assignments=(ADDRESS, *assignments), environ={})
    return Session(config, run_directory=tmp_path, say=lambda *_: None, replaces=True, **arguments)


def test_a_deployment_is_done_when_it_serves_and_not_when_another_one_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = replacing(tmp_path)
    workers = [{"id": each, "state": "ready", "links": []} for each in ("prefill-0", "decode-0")]
    status = {"state": "ready", "workers": workers, "config": digest_of(session.config)}
    monkeypatch.setattr(session, "_status", lambda: status)
    monkeypatch.setattr(session._watch, "update", lambda _: None)
    assert session._is_ready(RUNNING)
    status["config"] = "c0ffee"
    with pytest.raises(StartError, match="another deployment came meanwhile: c0ffee serves"):
        session._is_ready(RUNNING)


def test_what_runs_makes_no_room_for_what_finds_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = {"Alive": True, "NodeID": "n", "Resources": {"CPU": 2.0}, "Labels": {}}
    monkeypatch.setattr("ray.nodes", lambda: [node])
    key = "decode.num_cpus=64"
    replacing(tmp_path, key, waits_for_nodes=False).check_placement()  # nothing of ours is there
    session = replacing(tmp_path, key, waits_for_nodes=False)
    session._has_ours = True
    with pytest.raises(StartError, match=r"decode-0 needs 64 CPU.*what runs there goes on"):
        session.check_placement()
    session = replacing(tmp_path, key, waits_for_nodes=True)
    session._has_ours = True
    session.check_placement()
