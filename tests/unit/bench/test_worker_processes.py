"""What a bench shows of workers that fail."""

import sys
from pathlib import Path

import pytest

from bench.worker_processes import WorkerProcesses


def test_a_worker_that_ends_early_has_its_last_words_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    dying = (sys.executable, "-c", "import sys; sys.exit('no such model')")
    monkeypatch.setattr("bench.worker_processes._COMMAND", dying)
    with (
        pytest.raises(RuntimeError, match="prefill-0 ended"),
        WorkerProcesses(tmp_path, {}) as workers,
    ):
        workers.start("prefill")
    assert "no such model" in capsys.readouterr().err
    assert workers.processes["prefill-0"].returncode is not None
