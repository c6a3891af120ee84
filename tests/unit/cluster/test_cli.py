"""The `relevo` command itself."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cluster.cli import app

RELEVO = Path(sys.executable).with_name("relevo")
HELP_WITHIN_S = 0.3


def test_help_is_fast_and_lists_the_commands() -> None:
    took_s = []
    # Time on the processor, and more than once: what the clock says depends on what else runs, and
    # who shares a core gets less done in its time on it.
    while len(took_s) < 3 and not any(each < HELP_WITHIN_S for each in took_s):
        before = os.times()
        done = subprocess.run([RELEVO, "--help"], capture_output=True, text=True, check=True)
        took_s.append(os.times().children_user - before.children_user)
        assert {"serve", "chat", "status", "config"} <= set(done.stdout.split())
    assert min(took_s) < HELP_WITHIN_S


def test_the_command_itself_imports_nothing_heavy() -> None:
    code = (
        "import sys, cluster.cli\n"
        "print([name for name in ('ray', 'torch', 'transformers', 'httpx', 'pydantic')"
        " if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_config_show_and_validate(capfd: pytest.CaptureFixture[str]) -> None:
    runner = CliRunner()
    assert runner.invoke(app, ["config", "validate"]).exit_code == 0
    shown = runner.invoke(app, ["config", "show", "--set", "decode.replicas=2"])
    assert shown.exit_code == 0
    assert "replicas: 2" in shown.output
    wrong = runner.invoke(app, ["config", "validate", "--set", "decode.replcas=2"])
    assert wrong.exit_code == 2
    assert "did you mean 'decode.replicas'?" in wrong.output


@pytest.mark.parametrize("command", [["status"], ["chat", "-q", "hi"]])
def test_a_cluster_that_does_not_run_is_one_line(command: list[str]) -> None:
    # Port 9 (discard) has no listener.
    result = CliRunner().invoke(app, [*command, "--url", "http://127.0.0.1:9"])
    assert result.exit_code == 1
    assert "nothing answers at http://127.0.0.1:9" in result.output
