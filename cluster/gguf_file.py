"""Reads a GGUF file: its fields, and its tensors as plain numbers.

The `gguf` package reads a field string by string through numpy, which takes half a minute for a
vocabulary of 262,144 pieces; only its arithmetic of packed weights is used here.
"""

import mmap
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

_MAGIC = b"GGUF"
_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _ARRAY = 8, 9
_ALIGNMENT = 32  # of the data, unless the file says otherwise


class GGUFFile:
    """Owns the mapping of one file. `fields` are its metadata."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._at = len(_MAGIC)
        if self._bytes[: self._at] != _MAGIC:
            raise ValueError(f"Got {path = } but expected a GGUF file")
        self._scalar("I")  # version
        num_tensors, num_fields = self._scalar("Q"), self._scalar("Q")
        self.fields: dict[str, Any] = {}
        for _ in range(num_fields):
            name = self._string()
            self.fields[name] = self._value(self._scalar("I"))
        self._infos = [self._tensor_info() for _ in range(num_tensors)]
        alignment = self.fields.get("general.alignment", _ALIGNMENT)
        self._data_start = -(-self._at // alignment) * alignment

    def tensors(self) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
        """Each tensor's name and its values in float32."""
        for name, shape, kind, offset in self._infos:
            block, block_bytes = GGML_QUANT_SIZES[kind]
            row_bytes = shape[-1] // block * block_bytes
            num_rows = int(np.prod(shape[:-1], dtype=np.int64))
            packed = np.frombuffer(
                self._bytes, np.uint8, num_rows * row_bytes, self._data_start + offset
            )
            if kind == GGMLQuantizationType.F32:
                yield name, packed.view(np.float32).reshape(shape).copy()
            else:
                yield name, dequantize(packed.reshape(*shape[:-1], row_bytes), kind)

    def _scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from(f"<{code}", self._bytes, self._at)
        self._at += struct.calcsize(f"<{code}")
        return value

    def _string(self) -> str:
        length = self._scalar("Q")
        self._at += length
        return self._bytes[self._at - length : self._at].decode()

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._scalar(_SCALARS[kind])
        item_kind, length = self._scalar("I"), self._scalar("Q")
        if item_kind in (_STRING, _ARRAY):
            return [self._value(item_kind) for _ in range(length)]
        layout = f"<{length}{_SCALARS[item_kind]}"
        values = struct.unpack_from(layout, self._bytes, self._at)
        self._at += struct.calcsize(layout)
        return list(values)

    def _tensor_info(self) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
        name, num_dimensions = self._string(), self._scalar("I")
        # The file names the fastest dimension first.
        shape = tuple(self._scalar("Q") for _ in range(num_dimensions))[::-1]
        return name, shape, GGMLQuantizationType(self._scalar("I")), self._scalar("Q")
