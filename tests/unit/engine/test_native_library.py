"""Which compiled library a CPU gets: its own, or one that was built for its level elsewhere."""

from pathlib import Path

import pytest

from engine.native import library, library_file

V3 = "flags : fpu sse2 avx avx2 fma bmi1 bmi2 f16c movbe abm"
V4 = V3 + " avx512f avx512bw avx512cd avx512dq avx512vl"


@pytest.mark.parametrize(
    ("cpu", "levels"),
    [
        (V4, ["x86-64-v4", "x86-64-v3"]),
        (V3, ["x86-64-v3"]),
        (V4.replace("avx512vl", ""), ["x86-64-v3"]),
        (V4.replace(" fma", ""), []),
        ("Features : fp asimd", []),
    ],
)
def test_a_cpu_runs_the_levels_it_has_all_of(cpu: str, levels: list[str]) -> None:
    assert library_file.usable_levels(cpu) == levels


def test_a_library_that_travels_is_the_same_file_everywhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    paths = {}
    for cpu in (V3, V4):
        monkeypatch.setattr(library_file, "cpu_flags", lambda cpu=cpu: cpu)
        paths[cpu] = [
            library_file.library_path(level)
            for level in (library_file.NATIVE, *library_file.LEVELS)
        ]
    assert paths[V3][1:] == paths[V4][1:]
    assert paths[V3][0] != paths[V4][0]
    assert len(set(paths[V3] + paths[V4])) == 4


@pytest.mark.parametrize(
    ("built", "loaded"),
    [
        (["x86-64-v3", "x86-64-v4"], "x86-64-v4"),
        (["x86-64-v3"], "x86-64-v3"),
        (["x86-64-v3", "native"], "native"),
        ([], None),
    ],
)
def test_its_own_is_loaded_before_the_best_level(
    built: list[str], loaded: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(library_file, "cpu_flags", lambda: V4)
    monkeypatch.setattr(library_file, "library_path", lambda level="native": tmp_path / level)
    monkeypatch.setattr(library.torch.ops, "load_library", asked.append)
    for level in built:
        (tmp_path / level).touch()
    assert library.load_library.__wrapped__() is (loaded is not None)
    assert asked == ([] if loaded is None else [str(tmp_path / loaded)])
