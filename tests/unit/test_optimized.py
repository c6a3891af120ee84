"""No judgement rests on `assert`, which python -O leaves out."""

import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
VALIDATORS = (
    "tests/unit/api/test_generation_request.py",
    "tests/unit/api/test_api_keys.py",
    "tests/unit/cluster/test_config.py",
    "tests/unit/rpc/test_token.py",
)


def test_inputs_are_judged_without_assertions_too() -> None:
    command = [sys.executable, "-O", "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, *VALIDATORS], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert " passed" in done.stdout
