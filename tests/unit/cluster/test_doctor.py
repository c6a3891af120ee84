"""Each thing that `relevo doctor` looks at, well and unwell."""

import json
import resource
import shutil
import socket
from collections import namedtuple
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from cluster import doctor, doctor_gpus, doctor_machine, doctor_nodes, doctor_site
from cluster.cli import app
from cluster.config import ClusterConfig, load_config
from cluster.doctor_nodes import Survey, check_nodes
from cluster.finding import Finding, Level
from cluster.node_facts import NodeFacts, gather
from cluster.server_process import free_ports
from plan.model_config import read_model_config
from tests.unit.plan.configs import LLAMA_8B

Usage = namedtuple("Usage", "total used free")
GIB = 1024**3


def levels(*findings: Finding) -> list[str]:
    assert all(finding.advice for finding in findings if finding.level is not Level.OK)
    return [str(finding.level) for finding in findings]


def config_for(path: object, *assignments: str) -> ClusterConfig:
    return load_config(assignments=(f"model.path={path}", *assignments), environ={})


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({**LLAMA_8B, "num_hidden_layers": 1}))
    for name in ("tokenizer.json", "model.safetensors"):
        (directory / name).write_text("{}")
    return directory


# This machine.


def test_an_old_python_is_a_problem() -> None:
    assert levels(doctor_machine.check_python((3, 10, 9))) == ["problem"]
    assert levels(doctor_machine.check_python((3, 11, 0))) == ["ok"]


def test_versions_other_than_the_tested_ones_are_named() -> None:
    pinned = {"ray": "2.60.0", "torch": "2.13.0", "typer": ""}
    found = {"ray": "2.60.0", "torch": "2.13.0+cpu", "typer": "1"}
    assert levels(*doctor_machine.check_packages(pinned, found)) == ["ok"]
    [other] = doctor_machine.check_packages(pinned, {**found, "ray": "2.59.0"})
    assert other.level is Level.WARNING
    assert "ray 2.59.0 (tested: 2.60.0)" in other.text
    [missing] = doctor_machine.check_packages(pinned, {"ray": "2.60.0", "torch": "2.13.0"})
    assert missing.level is Level.PROBLEM
    assert missing.text == "not installed: typer"


def test_this_environment_is_the_tested_one() -> None:
    pinned = doctor_machine.pins(doctor_machine.ROOT / "constraints.txt")
    assert pinned["torch"]
    assert pinned["grpcio"]
    assert "pytest" not in pinned  # nobody needs it to serve


def test_limits_are_compared_with_what_is_needed() -> None:
    no_limit = resource.RLIM_INFINITY
    check = doctor_machine.check_limit
    assert levels(check("open files", (no_limit, no_limit))) == ["ok"]
    few = check("open files", (512, 1_000_000))
    assert (few.level, few.advice) == (Level.PROBLEM, "ulimit -n 16384")
    capped = check("open files", (4096, 4096))
    assert capped.level is Level.WARNING
    assert "hard limit of 4,096" in capped.advice
    assert levels(check("processes", (100, 100))) == ["warning"]


def test_docker_gives_too_little_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(64 * 1024**2, 0, 64 * 1024**2))
    small = doctor_machine.check_shared_memory(Path("/dev/shm"))
    assert small.level is Level.WARNING
    assert "--shm-size" in small.advice
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(2 * GIB, 0, 2 * GIB))
    assert levels(doctor_machine.check_shared_memory(Path("/dev/shm"))) == ["ok"]
    monkeypatch.undo()
    assert levels(doctor_machine.check_shared_memory(Path("/no/such"))) == ["problem"]


def test_a_quota_below_the_cores_is_warned_of(tmp_path: Path) -> None:
    assert doctor_machine.cpu_quota(tmp_path) is None
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert levels(doctor_machine.check_cpus(tmp_path)) == ["ok"]
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    half = doctor_machine.check_cpus(tmp_path)
    assert half.level is Level.WARNING
    assert "0.5" in half.text


def test_a_missing_compiler_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_machine, "find_library", lambda: None)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(shutil, "which", lambda _: None)
    assert "install a C++ compiler" in doctor_machine.check_native().advice
    monkeypatch.setattr(shutil, "which", lambda _: "/usr/bin/c++")
    assert "half a minute" in doctor_machine.check_native().advice
    monkeypatch.setattr(doctor_machine, "find_library", lambda: Path("built.so"))
    assert levels(doctor_machine.check_native()) == ["ok"]


def test_a_clock_that_nobody_keeps_matters_between_nodes() -> None:
    assert levels(doctor_machine.check_clock(is_alone=True)) == ["ok"]
    assert levels(doctor_machine.check_clock(is_alone=False))[0] in {"ok", "warning"}


# The configuration on this machine.


def test_a_good_checkpoint_is_described(checkpoint: Path) -> None:
    found = doctor_site.check_model(config_for(checkpoint))
    assert found.level is Level.OK
    assert "llama" in found.text


def test_a_checkpoint_that_cannot_serve_is_named(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert levels(doctor_site.check_model(config_for("/no/such"))) == ["problem"]
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", _refuse_weights)
        locked = doctor_site.check_model(config_for(checkpoint))
    assert locked.level is Level.PROBLEM
    assert "cannot read" in locked.text
    (checkpoint / "config.json").write_text(json.dumps({**LLAMA_8B, "model_type": "mamba"}))
    strange = doctor_site.check_model(config_for(checkpoint))
    assert strange.level is Level.WARNING
    assert "'mamba'" in strange.text


def _refuse_weights(file: Path, *arguments: Any, **more: Any) -> Any:
    if file.suffix == ".safetensors":
        raise PermissionError
    return open(file, *arguments, **more)


def test_a_file_that_is_not_there_is_a_problem(checkpoint: Path) -> None:
    config = config_for(checkpoint, "ingress.api_keys_file=/no/keys")
    [found] = doctor_site.check_settings(config)
    assert "ingress.api_keys_file /no/keys does not exist" in found.text


def test_workers_that_do_not_fit_together_are_warned_of(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=6 * GIB))
    monkeypatch.setattr(doctor_site, "machine_memory_bytes", lambda: 8 * GIB)
    blocks = "engine.num_kv_blocks=64"
    two = config_for(checkpoint, blocks)
    model = read_model_config(checkpoint)
    # 1.3 billion parameters once, and each worker's own process.
    assert levels(doctor_site.check_memory(two, model)) == ["ok"]
    many = doctor_site.check_memory(config_for(checkpoint, blocks, "decode.replicas=20"), model)
    assert many.level is Level.WARNING
    assert "fewer replicas" in many.advice
    assert "6.0 of 8.0 GiB free" in many.text


def test_a_taken_port_names_who_has_it() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        taken = doctor_site.check_port("127.0.0.1", port, key="ingress.http_port")
        assert taken.level is Level.PROBLEM
        assert "listens there" in taken.text
        assert "--set ingress.http_port=PORT" in taken.advice
        span = f"rpc.port_range={port}-{port}"
        assert levels(doctor_site.check_port_range(config_for("x", span))) == ["problem"]
    assert levels(doctor_site.check_port("127.0.0.1", port, key="ingress.http_port")) == ["ok"]


# Other nodes.

NODE = NodeFacts(
    node="10.0.0.2",
    versions=gather("here").versions,
    num_files=65_536,
    shm_free_bytes=GIB,
    num_cores=8,
    time_s=100.0,
)


def examine_node(node: NodeFacts) -> list[Finding]:
    survey = Survey(facts=[node], silent={}, start_s=99.0, end_s=101.0)
    return list(check_nodes(survey, replace(NODE, node="here")))


def test_a_node_like_this_one_is_well() -> None:
    assert levels(*examine_node(NODE)) == ["ok"]


@pytest.mark.parametrize(
    ("changes", "level", "text"),
    [
        ({"versions": {**NODE.versions, "ray": "2.1"}}, "problem", "ray 2.1 (here "),
        ({"versions": {**NODE.versions, "torch": ""}}, "problem", "torch missing"),
        ({"num_files": 256}, "problem", "256 open files"),
        ({"shm_free_bytes": 1}, "warning", "/dev/shm has 0 MiB free"),
        ({"time_s": 50.0}, "warning", "49 s off"),
        ({"time_s": 111.0}, "warning", "10 s off"),
    ],
)
def test_a_node_that_differs_is_named(changes: dict[str, Any], level: str, text: str) -> None:
    [found] = examine_node(replace(NODE, **changes))
    assert (found.level, found.check) == (level, "node 10.0.0.2")
    assert text in found.text


def test_a_node_without_our_code_is_named() -> None:
    survey = Survey(facts=[], silent={"b": "No module named 'cluster'"}, start_s=0.0, end_s=1.0)
    [found] = check_nodes(survey, NODE)
    assert found.level is Level.PROBLEM
    assert "cannot run our code: No module" in found.text


def test_a_ray_that_is_not_there_is_a_problem(checkpoint: Path) -> None:
    config = config_for(checkpoint, "cluster.ray_address=127.0.0.1:9")
    [found] = doctor_nodes.examine(config)
    assert found.level is Level.PROBLEM
    assert "cannot join the Ray cluster at 127.0.0.1:9" in found.text


# GPUs.


class FakeCuda:
    """What torch.cuda says on a machine with two GPUs."""

    is_there = True
    free = 79 * GIB
    nccl = SimpleNamespace(version=lambda: (2, 27, 5))

    def is_available(self) -> bool:
        return self.is_there

    def device_count(self) -> int:
        return 2

    def get_device_properties(self, _: int) -> SimpleNamespace:
        return SimpleNamespace(name="NVIDIA H100")

    def mem_get_info(self, _: int) -> tuple[int, int]:
        return self.free, 80 * GIB

    def can_device_access_peer(self, one: int, other: int) -> bool:
        return one < other


def fake_torch(*, cuda: str | None = "12.8", **facts: Any) -> SimpleNamespace:
    device = FakeCuda()
    for name, value in facts.items():
        setattr(device, name, value)
    return SimpleNamespace(
        __version__="2.13.0",
        version=SimpleNamespace(cuda=cuda),
        cuda=device,
        distributed=SimpleNamespace(is_nccl_available=lambda: True),
    )


def test_gpus_are_listed_with_their_wires() -> None:
    found = list(doctor_gpus.check_gpus(fake_torch()))
    assert levels(*found) == ["ok", "ok", "ok", "warning"]
    assert [each.check for each in found] == ["gpu 0", "gpu 1", "nccl", "peer access"]
    assert found[2].text == "2.27.5"
    assert "1→0" in found[3].text
    assert "0→1" not in found[3].text


def test_a_gpu_that_torch_cannot_use_is_a_problem() -> None:
    assert levels(*doctor_gpus.check_gpus(fake_torch(cuda=None))) == ["problem"]
    assert levels(*doctor_gpus.check_gpus(fake_torch(is_there=False))) == ["problem"]
    assert levels(*doctor_gpus.check_gpus(fake_torch(free=GIB)))[0] == "warning"


def test_gpus_that_are_asked_for_are_looked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(doctor_gpus, "DEVICES", tmp_path)
    assert levels(*doctor_gpus.examine(wants_gpu=False)) == ["ok"]
    assert levels(*doctor_gpus.examine(wants_gpu=True)) == ["warning"]
    (tmp_path / "nvidia0").touch()
    monkeypatch.setattr("importlib.import_module", lambda _: fake_torch())
    assert levels(*doctor_gpus.examine(wants_gpu=True))[:2] == ["ok", "ok"]


# The command.


def test_the_command_says_all_and_tells_by_its_status(checkpoint: Path) -> None:
    ports = [f"--set=ingress.{name}_port={free_ports(1)[0]}" for name in ("http", "grpc")]
    arguments = ["doctor", "--set", f"model.path={checkpoint}", *ports]
    well = CliRunner().invoke(app, [*arguments, "--json"])
    found = json.loads(well.output)
    problems = [each["text"] for each in found["findings"] if each["level"] == "problem"]
    assert (well.exit_code, found["ok"]) == (1, False) if problems else (0, True)
    checks = {each["check"] for each in found["findings"]}
    assert {"python", "packages", "open files", "shared memory", "gpu", "model", "ray"} <= checks
    unwell = CliRunner().invoke(app, ["doctor", "--set", "model.path=/no/such"])
    assert unwell.exit_code == 1
    assert "model.path /no/such does not exist" in unwell.output
    assert "cannot serve as it is" in unwell.output


def test_a_wrong_key_is_a_problem_and_the_rest_is_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(doctor_machine, "examine", lambda: iter(()))
    found = list(doctor.examine(None, ["model.pth=x"]))
    [wrong] = [each for each in found if each.level is Level.PROBLEM]
    assert "did you mean" in wrong.text
    assert "gpu" in {each.check for each in found}
