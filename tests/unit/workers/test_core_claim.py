"""Claims on cores: all or none, and nobody has one of another's."""

import os
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from workers import core_claim
from workers.core_claim import CoreClaim, whole_cores_first

CLAIM = """
import sys
from workers.core_claim import CoreClaim
claim = CoreClaim(2, namespace=sys.argv[1])
print(claim.try_claim(range(2)), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def namespace() -> str:
    return f"relevo.test.{uuid.uuid4().hex}"


@pytest.fixture(autouse=True)
def no_hyperthreads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(core_claim, "_TOPOLOGY", tmp_path)
    return tmp_path


def test_nobody_gets_what_another_has(namespace: str) -> None:
    first, second = CoreClaim(2, namespace=namespace), CoreClaim(1, namespace=namespace)
    assert first.try_claim([3, 5, 8])
    assert second.try_claim([3, 5, 8])
    assert (first.cores, second.cores) == ((3, 5), (8,))
    assert first.try_claim([3, 5, 8])  # again: it keeps them
    assert first.cores == (3, 5)


def test_too_few_are_none_and_nothing_of_them_is_kept(namespace: str) -> None:
    first, second = CoreClaim(2, namespace=namespace), CoreClaim(3, namespace=namespace)
    assert not second.try_claim(range(2))
    assert second.cores == ()
    assert first.try_claim(range(2))
    assert not second.try_claim(range(4))
    first.release()
    assert second.try_claim(range(4))


def test_a_killed_process_leaves_nothing(namespace: str) -> None:
    command = [sys.executable, "-c", CLAIM, namespace]
    other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    claim = CoreClaim(1, namespace=namespace)
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == "True\n"
        assert not claim.try_claim(range(2))
    finally:
        other.kill()
        other.communicate()
    assert claim.try_claim(range(2))


def test_only_cores_that_this_process_may_use(namespace: str) -> None:
    claim = CoreClaim(1, namespace=namespace)
    assert claim.try_claim()
    assert set(claim.cores) <= os.sched_getaffinity(0)


def test_second_threads_of_a_core_come_last(no_hyperthreads: Path) -> None:
    for core, siblings in {0: "0,2", 1: "1,3", 2: "0,2", 3: "1,3"}.items():
        topology = no_hyperthreads / f"cpu{core}" / "topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(siblings + "\n")
    assert whole_cores_first([3, 2, 1, 0]) == [0, 1, 2, 3]
    assert whole_cores_first([2, 1, 3]) == [1, 2, 3]
    assert whole_cores_first([0, 2, 9]) == [0, 9, 2]
