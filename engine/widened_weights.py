"""Weights in a wider dtype than their file's, converted once and shared by all workers of a node.

A worker that converts for itself has a copy of its own, which nobody can share. The copy made here
is a checkpoint like any other, so its parameters are pages of a file:

    $XDG_CACHE_HOME/relevo/weights/<path and dtype>-<state of the files>/*.safetensors

Made under a lock and renamed into its place when whole; what it replaces is removed with it.
"""

import fcntl
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import safe_open

logger = logging.getLogger(__name__)

MIN_BYTES = 64 * 1024**2  # of a checkpoint: below that a copy for each worker is no loss
_FREE_SHARE = 2  # times the copy's size must be free on the disk
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def shared_copy(directory: Path, dtype: torch.dtype) -> Path:
    """Where weights of `dtype` are to be loaded from: a copy, or the directory where that is best.

    Widening is exact, so both give the same model.
    """
    files = sorted(directory.glob("*.safetensors"))
    num_bytes = _widened_bytes(directory, files, dtype)
    if not num_bytes:
        return directory
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "relevo" / "weights"
    origin = _digest(str(directory.resolve()), str(dtype))
    states = [f"{file.name} {file.stat().st_size} {file.stat().st_mtime_ns}" for file in files]
    copy = root / f"{origin}-{_digest(*states)}"
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _locked(root / f"{origin}.lock"):
            if not copy.is_dir():
                _make(copy, directory, files, dtype, num_bytes)
    except OSError as error:
        logger.warning("each worker converts its weights for itself: %s", error)
        return directory
    return copy


def _widened_bytes(directory: Path, files: list[Path], dtype: torch.dtype) -> int:
    """Size of the copy; 0 when none is wanted."""
    if dtype not in _NAMES or sum(file.stat().st_size for file in files) < MIN_BYTES:
        return 0
    if "quantization_config" in json.loads((directory / "config.json").read_text()):
        return 0
    num_bytes, is_narrower = 0, False
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - it is no mapping
                part = tensors.get_slice(name)
                own = _DTYPES.get(part.get_dtype())
                if own is None or own.itemsize > dtype.itemsize:
                    return 0  # not for us to judge
                is_narrower = is_narrower or own.itemsize < dtype.itemsize
                num_elements = torch.Size(part.get_shape()).numel()
                num_bytes += num_elements * dtype.itemsize
    return num_bytes if is_narrower else 0


def _make(
    copy: Path, directory: Path, files: list[Path], dtype: torch.dtype, num_bytes: int
) -> None:
    if shutil.disk_usage(copy.parent).free < _FREE_SHARE * num_bytes:
        raise OSError(f"{copy.parent} has less than {_FREE_SHARE} x {num_bytes} bytes free")
    logger.info("converting the weights of %s to %s, once", directory, dtype)
    origin = copy.name.partition("-")[0]
    for old in copy.parent.glob(f"{origin}-*"):
        shutil.rmtree(old)  # a worker that has it mapped keeps its pages
    unfinished = copy.with_name(f"{copy.name}.unfinished")
    unfinished.mkdir(mode=0o700)
    for pattern in ("config.json", "generation_config.json", "*.index.json"):
        for file in directory.glob(pattern):
            shutil.copyfile(file, unfinished / file.name)
    for file in files:
        _widen(file, unfinished / file.name, dtype)
    unfinished.rename(copy)


def _widen(source: Path, target: Path, dtype: torch.dtype) -> None:
    """Tensor by tensor, so that no more than one is in memory."""
    with safe_open(source, framework="pt") as tensors, target.open("wb") as file:
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        start = 0
        names = list(tensors.keys())
        for name in names:
            shape = tensors.get_slice(name).get_shape()
            end = start + torch.Size(shape).numel() * dtype.itemsize
            header[name] = {"dtype": _NAMES[dtype], "shape": shape, "data_offsets": [start, end]}
            start = end
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 64)  # the tensors begin on a boundary
        file.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            widened = tensors.get_tensor(name).to(dtype).contiguous()
            file.write(widened.view(-1).view(torch.uint8).numpy().data)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
