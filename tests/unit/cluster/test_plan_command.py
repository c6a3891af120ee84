"""`relevo plan` as a person calls it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cluster.cli import app
from tests.unit.plan.configs import LLAMA_8B


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    return tmp_path


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["plan", *arguments])
    return result.exit_code, result.output


def test_tables_and_a_picture_come_out(llama: Path, tmp_path: Path) -> None:
    picture = tmp_path / "plan.png"
    status, text = run(str(llama), "--hardware", "h100", "--price", "3", "--plot", str(picture))
    assert status == 0, text
    for part in ("8,030.3 M parameters", "KV per token", "128.0 KiB", "131,072", "recommended:"):
        assert part in text
    assert "cost per million tokens" in text
    assert picture.read_bytes()[:4] == b"\x89PNG"


def test_numbers_come_out_and_the_simulator_takes_the_hardware(llama: Path, tmp_path: Path) -> None:
    status, text = run(str(llama), "--hardware", "h200", "--json", "--workers", "3")
    assert status == 0, text
    found = json.loads(text)
    assert found["model"]["num_parameters"] == 8_030_261_248
    assert found["memory"]["decode"]["kv_bytes_per_token"] == 131_072
    assert found["split"]["num_prefill"] + found["split"]["num_decode"] == 3
    assert found["costs_per_million_tokens"] is None
    hardware = tmp_path / "hardware.json"
    hardware.write_text(json.dumps(found["hardware"]))
    small = ["--requests", "5", "--prefill", "1", "--decode", "1", "--policy", "relevo"]
    simulated = CliRunner().invoke(app, ["sim", *small, "--hardware", str(hardware)])
    assert simulated.exit_code == 0, simulated.output


def test_a_pool_of_its_own_settings_has_its_own_column(llama: Path) -> None:
    changes = ["--set", "prefill.engine.max_num_batched_tokens=8192", "--hardware", "h100"]
    status, text = run(str(llama), *changes)
    assert status == 0, text
    assert "prefill worker" in text
    assert "each worker" not in text


def test_hardware_of_ones_own(llama: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("base: a100\nnum_bytes: 48e9\nhas_half_arithmetic: true\n")
    status, text = run(str(llama), "--hardware", str(file), "--json")
    assert status == 0, text
    memory = json.loads(text)["memory"]["decode"]
    assert memory["weights_bytes"] + memory["kv_bytes"] < 48e9
    measured = tmp_path / "measured.json"
    measured.write_text('{"fixed_s": 1.5}')
    status, text = run(str(llama), "--hardware", str(file), "--measured", str(measured), "--json")
    assert json.loads(text)["contexts"][0]["single_tpot_s"] > 1.5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["/nowhere"], "cannot read /nowhere"),
        (["--hardware", "h900"], "a100, h100, h200, cpu or a YAML file"),
        (["--set", "engine.block_sise=3"], "did you mean 'engine.block_size'?"),
        (["--input", "999999"], "expected at most"),
        (["--measured", "/nowhere"], "cannot read /nowhere"),
    ],
)
def test_a_wrong_question_is_one_line(
    llama: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model = [] if arguments[0].startswith("/") else [str(llama)]
    hardware = [] if "--hardware" in arguments else ["--hardware", "h100"]
    status, text = run(*model, *hardware, *arguments)
    printed = text + capsys.readouterr().err
    assert status == 2, printed
    assert message in printed


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- 1", "expected keys and values"),
        ("bytes: 3", "unknown 'bytes'"),
        ("flops: fast", "flops = 'fast' but expected a number"),
        ("flops: 0", "expected more than 0"),
        ("kind: tpu", "expected cuda or cpu"),
        ("{", "is not YAML"),
    ],
)
def test_a_bad_hardware_file_is_one_line(
    llama: Path, tmp_path: Path, text: str, message: str
) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    status, printed = run(str(llama), "--hardware", str(file))
    assert status == 2
    assert message in printed


def test_nothing_heavy_is_loaded(llama: Path) -> None:
    code = (
        "import sys\nfrom typer.testing import CliRunner\nfrom cluster.cli import app\n"
        f"assert CliRunner().invoke(app, ['plan', {str(llama)!r}, '--hardware', 'h100'])"
        ".exit_code == 0\n"
        "print([name for name in ('ray', 'torch', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
