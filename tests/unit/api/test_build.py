"""What /version says: code, configuration and model by what they hold."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.requests import Request

from api.build import Build, digest_of, packages, this_build
from api.config import ModelConfig
from api.information_routes import InformationRoutes

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name, text in {
        "api/a.py": "1",
        "engine/native/b.cpp": "2",
        "engine/native/b.cc": "2",
        "protos/relevo/v1/c_pb2.py": "3",
        "tests/d.py": "4",
        "api/static/e.js": "5",
    }.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return tmp_path


FOLDERS = ["api", "engine", "protos"]


@pytest.mark.parametrize(
    "name",
    ["api/a.py", "engine/native/b.cpp", "engine/native/b.cc", "protos/relevo/v1/c_pb2.py"],
)
def test_other_code_is_another_build(tree: Path, name: str) -> None:
    before = digest_of(tree, FOLDERS)
    assert len(before) == 16
    (tree / name).write_text("changed")
    assert digest_of(tree, FOLDERS) != before


def test_what_is_no_code_of_ours_does_not_count(tree: Path) -> None:
    before = digest_of(tree, FOLDERS)
    (tree / "tests" / "d.py").write_text("changed")
    (tree / "api" / "a.pyc").write_text("new")
    assert digest_of(tree, FOLDERS) == before


def test_an_installed_package_is_the_same_build_as_its_checkout(tree: Path) -> None:
    before = digest_of(tree, FOLDERS)
    (tree / "protos" / "relevo").rename(tree / "relevo")
    assert digest_of(tree, ["relevo", "engine", "api"]) == before


def test_all_packages_of_the_checkout_are_named() -> None:
    named = packages(ROOT)
    assert {"api", "cluster", "engine", "plan", "protos", "sim"} <= set(named)
    assert "tests" not in named
    assert all((ROOT / name).is_dir() for name in named)


def test_a_build_reads_as_one_line() -> None:
    known = Build(version="1.2", commit="0123456789abcdef", digest="d")
    assert str(known) == "version 1.2, build d, commit 0123456789ab"
    assert str(Build(version="1.2", commit="", digest="d")) == "version 1.2, build d"


async def test_version_names_code_configuration_and_model() -> None:
    serving: Any = SimpleNamespace(
        config_digest="c0ffee",
        model_config=ModelConfig(model_id="tiny", path="p", revision="r1"),
    )
    sink: Any = None
    response = await InformationRoutes(serving, sink).version(Request({"type": "http"}))
    told = json.loads(response.body)
    build = this_build()
    assert told == {
        "version": build.version,
        "commit": build.commit or None,
        "build": build.digest,
        "config": "c0ffee",
        "model": "tiny",
        "revision": "r1",
    }
