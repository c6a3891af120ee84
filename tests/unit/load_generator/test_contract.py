"""What a contract may say, and how it is told what is wrong with it."""

from pathlib import Path
from typing import Any

import pytest

from load_generator.contract import Contract, ContractError, make_contract, read_contract
from load_generator.profiles import PROFILES

PHASE: dict[str, Any] = {"profile": "short-short", "requests": 10, "rate_per_s": 2}


def contract(**phase: Any) -> Contract:
    return make_contract({"model": "m", "phases": [{**PHASE, **phase}]})


def test_a_phase_is_what_its_profile_says_unless_it_says_otherwise() -> None:
    [phase] = contract(prompt_tokens=128).phases
    assert (phase.prompt_tokens.low, phase.prompt_tokens.high) == (128, 128)
    assert phase.output_tokens.median == PROFILES["short-short"]["output_tokens"]["median"]
    assert phase.title == "short-short"


@pytest.mark.parametrize("profile", sorted(set(PROFILES) - {"replay"}))
def test_every_profile_is_a_valid_phase(profile: str) -> None:
    assert contract(profile=profile).phases[0].profile == profile


def test_the_shipped_contracts_can_be_read() -> None:
    folder = Path(__file__).resolve().parents[3] / "deploy/contracts"
    paths = sorted(folder.glob("*.yaml"))
    assert paths
    assert [read_contract(path).phases for path in paths]
    demo = read_contract(folder / "demo.yaml")
    assert {phase.profile for phase in demo.phases} == set(PROFILES) - {"replay"}


@pytest.mark.parametrize(
    ("phase", "message"),
    [
        ({"profile": "shrt"}, "phases[0].profile: Input should be 'short-short'"),
        ({"requests": 0}, "phases[0].requests: Input should be greater than or equal to 1 (got 0)"),
        ({"rate_per_s": None}, "phases[0]: arrivals poisson need rate_per_s"),
        ({"rat_per_s": 2}, "phases[0].rat_per_s: unknown key; did you mean 'rate_per_s'?"),
        ({"arrivals": "closed"}, "closed arrivals need max_concurrency and no rate_per_s"),
        ({"prompt_tokens": {"low": 9, "high": 3}}, "prompt_tokens: low = 9 is above high = 3"),
        ({"prompt_tokens": 0}, "phases[0].prompt_tokens.low"),
        ({"slo": {"ttft_ms": {"p99x": 5}}}, "'p99x' is no percentile"),
        ({"slo": {"ttft_ms": {"p99": -5}}}, "greater than 0 (got -5)"),
        ({"slo": {"ttft": {}}}, "did you mean 'ttft_ms'?"),
        ({"trace": "t.jsonl"}, "the profile replay, and only it, needs a trace"),
        ({"profile": "replay"}, "the profile replay, and only it, needs a trace"),
        ({"cancel_share": 1.5}, "phases[0].cancel_share"),
    ],
)
def test_a_wrong_phase_is_one_line_with_its_place(phase: dict[str, Any], message: str) -> None:
    with pytest.raises(ContractError) as caught:
        contract(**phase)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ([], "a contract is a table of keys, got list"),
        ({"model": "m"}, "phases: Field required"),
        ({"model": "m", "phases": []}, "phases"),
        ({"model": "m", "phases": [PHASE, PHASE]}, "two phases are called 'short-short'"),
        ({"phases": [PHASE]}, "model: Field required"),
        ({"model": "m", "phases": [PHASE], "token_ids": [9, 9]}, "must be a range of ids"),
        ({"model": "m", "phases": [3]}, "phases[0]"),
    ],
)
def test_a_wrong_contract_is_one_line(tree: Any, message: str) -> None:
    with pytest.raises(ContractError) as caught:
        make_contract(tree)
    assert message in str(caught.value)


def test_a_file_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ContractError, match="cannot read the contract"):
        read_contract(tmp_path / "none.yaml")
    (tmp_path / "bad.yaml").write_text("a: [")
    with pytest.raises(ContractError, match="is not valid YAML"):
        read_contract(tmp_path / "bad.yaml")


def test_a_trace_lies_beside_its_contract(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("model: m\nphases: [{profile: replay, requests: 5, trace: t.jsonl}]\n")
    assert read_contract(path).phases[0].trace == tmp_path / "t.jsonl"
