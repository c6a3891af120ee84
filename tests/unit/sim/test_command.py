import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cluster.cli import app
from sim.policies import POLICIES

SMALL = ["sim", "synthetic", "--requests", "30", "--prefill", "1", "--decode", "1"]


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, [*SMALL, *arguments])
    return result.exit_code, result.output


def test_a_table_numbers_and_pictures_come_out(tmp_path: Path) -> None:
    numbers = tmp_path / "numbers.json"
    status, text = run("--rate", "3", "--json", str(numbers), "--plots", str(tmp_path))
    assert status == 0, text
    reports = json.loads(numbers.read_text())["reports"]
    assert [report["policy"] for report in reports] == list(POLICIES)
    assert all(report["num_requests"] == 30 for report in reports)
    assert all(policy in text for policy in POLICIES)
    assert (tmp_path / "latencies.png").read_bytes()[:4] == b"\x89PNG"
    assert (tmp_path / "comparison.png").stat().st_size > 5000


def test_the_best_split_is_searched(tmp_path: Path) -> None:
    numbers = tmp_path / "splits.json"
    status, text = run(
        "--search-split", "--prefill", "2", "--decode", "2", "--load", "0.5", "--json", str(numbers)
    )
    assert status == 0, text
    assert "saturated at" in text
    found = json.loads(numbers.read_text())
    assert sum(found["best"]) == 4
    best = max(split["good_share"] for split in found["splits"])
    [chosen] = [s for s in found["splits"] if [s["prefill"], s["decode"]] == found["best"]]
    assert chosen["good_share"] == best


def test_autoscaling_is_compared_with_serve_s(tmp_path: Path) -> None:
    numbers = tmp_path / "scaling.json"
    status, text = run("--autoscale", "--rate", "3", "--json", str(numbers))
    assert status == 0, text
    assert "of those of Serve's policy at +0.0% good requests" in text
    reports = json.loads(numbers.read_text())["scaling"]
    assert [report["policy"] for report in reports[:3]] == ["fixed", "relevo", "serve 0.5/4"]
    # One worker of each is the least and the most.
    assert {report["most_prefill"] + report["most_decode"] for report in reports} == {2}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policy", "mine"], "expected one of relevo"),
        (["--hardware", "h900"], "h100, h200 or a JSON file"),
        (["--kill", "decode-0"], "WORKER@SECONDS"),
        (["--kill", "decode-7@1"], "no worker 'decode-7'"),
        (["--kill", "decode-0@nan"], "expected 0 or more seconds"),
        (["--block-size", "100"], "divisor"),
        (["--rate", "0"], "greater than or equal to"),
        (["--load", "nan"], "greater than or equal to"),
        (["--requests", "1"], "at least 2 are needed"),
        (["--requests", "2", "--load", "0.5"], "too few"),
        (["--prefill", "0", "--autoscale"], "from one worker"),
        (["--decode", "0"], "greater than or equal to"),
        (["--json", "/nowhere/a.json"], "a folder that exists"),
        (["--json", "/tmp"], "a folder that exists"),
        (["--plots", __file__], "exists"),
    ],
)
def test_a_wrong_question_is_answered_at_once(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, text = run(*arguments)
    assert status == 2
    assert message in text + capsys.readouterr().err
