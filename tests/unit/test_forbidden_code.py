"""Nothing in the product runs what came over a wire or lay in a file."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
# Whatever there is, also what comes later.
PACKAGES = {file.parent.name for file in REPOSITORY.glob("*/__init__.py")} - {"tests"} | {"protos"}
MODULES = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "jsonpickle", "joblib"}
CALLS = {"eval", "exec", "__import__"}
# Name of an attribute -> the modules whose own it is there; None: of whatever object.
ATTRIBUTES: dict[str, set[str] | None] = {
    "load": {"yaml", "torch"},
    "load_all": {"yaml"},
    "full_load": {"yaml"},
    "unsafe_load": {"yaml"},
    "send_object_list": None,
    "recv_object_list": None,
    "broadcast_object_list": None,
    "scatter_object_list": None,
    "gather_object": None,
    "all_gather_object": None,
}


def findings(tree: ast.AST) -> Iterator[str]:
    """What a module must not do, each with its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = {alias.name for alias in node.names} | {getattr(node, "module", None) or ""}
            if {part for name in names for part in name.split(".")} & MODULES:
                yield f"{node.lineno}: imports {sorted(names)}"
        elif isinstance(node, ast.Name) and node.id in CALLS:
            yield f"{node.lineno}: {node.id}"
        elif isinstance(node, ast.Attribute) and node.attr in ATTRIBUTES:
            owners = ATTRIBUTES[node.attr]
            if owners is None or (isinstance(node.value, ast.Name) and node.value.id in owners):
                yield f"{node.lineno}: .{node.attr}"
        elif isinstance(node, ast.keyword) and node.arg in {"allow_pickle", "trust_remote_code"}:
            if not (isinstance(node.value, ast.Constant) and node.value.value is False):
                yield f"{node.value.lineno}: {node.arg}"
        elif isinstance(node, ast.keyword) and node.arg == "shell":
            yield f"{node.value.lineno}: a shell"


def test_no_module_of_ours_unpickles_or_evaluates() -> None:
    files = [file for package in PACKAGES for file in (REPOSITORY / package).rglob("*.py")]
    assert {"api", "rpc", "kv_transfer", "protos"} < PACKAGES
    assert len(files) > 300
    found = {
        str(file.relative_to(REPOSITORY)): told
        for file in files
        if (told := list(findings(ast.parse(file.read_text()))))
    }
    assert found == {}


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "from pickle import loads",
        "import ray.cloudpickle as c",
        "from ray import cloudpickle",
        "eval('1')",
        "f = exec",
        "yaml.load(text)",
        "torch.load(path)",
        "dist.all_gather_object(a, b)",
        "np.load(p, allow_pickle=True)",
        "AutoModel.from_pretrained(p, trust_remote_code=flag)",
        "subprocess.run('ls', shell=True)",
    ],
)
def test_the_scan_sees(code: str) -> None:
    assert list(findings(ast.parse(code)))


@pytest.mark.parametrize("file", ["api/api_keys.py", "rpc/interceptors.py"])
def test_secrets_are_compared_in_constant_time(file: str) -> None:
    tree = ast.parse((REPOSITORY / file).read_text())
    called = {
        f"{node.func.value.id}.{node.func.attr}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
    }
    assert "hmac.compare_digest" in called
