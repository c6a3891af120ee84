"""A fault plan acts exactly as often as it says, over all processes that share its folder."""

import json
from pathlib import Path

import pytest

from faults import plan as plan_module
from faults.plan import Fault, FaultPlan, PlanFolder, _parse


def _plan(folder: Path | None, **fault: object) -> FaultPlan:
    environ = {"RELEVO_TESTING": "1", "RELEVO_FAULT_PLAN": json.dumps([fault])}
    if folder is not None:
        environ["RELEVO_FAULT_DIR"] = str(folder)
    return FaultPlan.from_environment(environ)


def test_a_plan_is_refused_outside_tests() -> None:
    with pytest.raises(ValueError, match="RELEVO_TESTING"):
        FaultPlan.from_environment({"RELEVO_FAULT_PLAN": "[]"})


@pytest.mark.parametrize(
    "fault",
    [
        {"point": "nowhere", "action": "kill"},
        {"point": "sample", "action": "explode"},
        {"point": "sample", "action": "kill", "match": {"colour": "red"}},
    ],
)
def test_a_plan_that_could_never_act_is_refused(fault: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="expected"):
        _plan(None, **fault)


def test_after_and_count_bound_when_a_fault_acts() -> None:
    plan = _plan(None, point="sample", action="raise", after=1, count=2)
    assert [plan.due("sample", {}) is not None for _ in range(5)] == [
        False,
        True,
        True,
        False,
        False,
    ]


def test_count_zero_acts_always() -> None:
    plan = _plan(None, point="sample", action="raise", count=0)
    assert all(plan.due("sample", {}) for _ in range(4))


def test_a_fault_matches_identity_and_request_label() -> None:
    plan = _plan(
        None, point="sample", action="raise", match={"pool": "decode", "request_label": "victim"}
    )
    plan.identity.update(pool="decode", worker="decode-0")
    assert plan.due("sample", {"request_label": "other"}) is None
    assert plan.due("decode_step", {"request_label": "victim"}) is None
    assert plan.due("sample", {"request_label": "victim"}) is not None


def test_hits_are_shared_through_the_folder(tmp_path: Path) -> None:
    first = _plan(tmp_path, point="sample", action="raise")
    restarted = _plan(tmp_path, point="sample", action="raise")
    assert first.due("sample", {}) is not None
    assert restarted.due("sample", {}) is None


def test_a_file_in_the_folder_is_in_force_as_long_as_it_is_there(tmp_path: Path) -> None:
    plan = FaultPlan.from_environment({"RELEVO_TESTING": "1", "RELEVO_FAULT_DIR": str(tmp_path)})
    assert plan.due("sample", {}) is None
    made = tmp_path / "made"
    made.write_text(json.dumps([{"point": "sample", "action": "raise", "count": 0}]))
    made.rename(tmp_path / "raising.json")
    assert plan.due("sample", {}) is not None
    assert plan.due("sample", {}) is not None
    (tmp_path / "raising.json").unlink()
    assert plan.due("sample", {}) is None


def test_the_folder_alone_does_nothing_outside_tests(tmp_path: Path) -> None:
    (tmp_path / "raising.json").write_text(json.dumps([{"point": "sample", "action": "raise"}]))
    plan = FaultPlan.from_environment({"RELEVO_FAULT_DIR": str(tmp_path)})
    assert not plan
    assert plan.due("sample", {}) is None


def test_what_is_in_force_stays_whole_while_a_change_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = json.dumps([{"point": "sample", "action": "raise"}])
    (tmp_path / "a.json").write_text(text)
    (tmp_path / "b.json").write_text(text)
    folder = PlanFolder(tmp_path)
    assert list(folder.faults()) == ["a-0", "b-0"]
    (tmp_path / "c.json").write_text(text)
    seen_by_others = []

    def parse(text: str) -> list[Fault]:
        seen_by_others.append(list(folder._faults))
        return _parse(text)

    monkeypatch.setattr(plan_module, "_parse", parse)
    assert list(folder.faults()) == ["a-0", "b-0", "c-0"]
    assert seen_by_others == [["a-0", "b-0"]] * 3
