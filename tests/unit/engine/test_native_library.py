"""Which compiled library a CPU gets: its own, or one that was built for its level elsewhere."""

from pathlib import Path

import pytest

from engine.native import library, library_file

V3 = "flags : fpu sse2 avx avx2 fma bmi1 bmi2 f16c movbe abm"
V4 = V3 + " avx512f avx512bw avx512cd avx512dq avx512vl"
VECTORS = V4 + " avx512_bf16"
TILES = VECTORS + " amx_bf16 amx_tile"
V4_LEVELS = ["x86-64-v4", "x86-64-v3"]
VECTORS_LEVELS = ["x86-64-v4+avx512bf16", *V4_LEVELS]


@pytest.mark.parametrize(
    ("cpu", "levels"),
    [
        (TILES, ["x86-64-v4+avx512bf16+amx-tile+amx-bf16", *VECTORS_LEVELS]),
        (TILES.replace(" avx512_bf16", ""), V4_LEVELS),
        (VECTORS, VECTORS_LEVELS),
        (V4, V4_LEVELS),
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
    assert len(set(paths[V3] + paths[V4])) == 2 + len(library_file.LEVELS)


def test_a_level_is_compiled_for_its_architecture_and_what_it_has_beside() -> None:
    plain = library_file.compile_flags("x86-64-v4")
    flags = library_file.compile_flags("x86-64-v4+avx512bf16+amx-tile+amx-bf16")
    assert set(flags) - set(plain) == {"-mavx512bf16", "-mamx-tile", "-mamx-bf16"}
    assert "-march=x86-64-v4" in flags


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
