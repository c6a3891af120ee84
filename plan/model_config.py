"""Reads a model's config.json, and nothing else of it."""

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import orjson

from engine.servable import refuse_unservable
from plan.families import FAMILIES, Family, Flag

# What some families call it.
_ALIASES = {
    "hidden_size": ("n_embd",),
    "num_hidden_layers": ("n_layer",),
    "num_attention_heads": ("n_head",),
    "max_position_embeddings": ("n_positions",),
    "dtype": ("torch_dtype",),
    "rope_parameters": ("rope_scaling",),
    "num_experts": ("num_local_experts", "n_routed_experts"),
}
_ROPE_ALIASES = {"su": "longrope"}


class ModelConfig:
    """One config.json, its numbers by the names that most families have for them."""

    def __init__(self, values: Mapping[str, Any], *, source: str) -> None:
        self.source = source
        self._top = values
        self._values = {**values, **(values.get("text_config") or {})}
        self._refuse()
        self.family: Family = FAMILIES[self.model_type]

    def __getattr__(self, name: str) -> Any:
        """As transformers' configurations have it; AttributeError where it is left out."""
        if name.startswith("_"):
            raise AttributeError(name)
        value = self._find(name)
        if value is None:
            raise AttributeError(f"{self.source} has no {name!r}")
        return value

    def get(self, name: str, default: Any = None) -> Any:
        """The value of a key, or of a name it has in this family."""
        value = self._find(name)
        if value is None:
            value = self.family.defaults.get(name)
        return default if value is None else value

    def number(self, name: str) -> int:
        """A count that must be there; ValueError where it is not."""
        value = self.get(name)
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{self.source}: got {name} = {value!r} but expected a number")
        return value

    def has(self, flag: Flag) -> bool:
        """Whether a part is there that a family has always, never, or when a key says so."""
        return bool(self.get(flag)) if isinstance(flag, str) else flag

    @cached_property
    def model_type(self) -> str:
        """The family."""
        return str(self._find("model_type") or "")

    @property
    def sub_configs(self) -> list[str]:
        """Parts besides the text, such as a vision tower."""
        return [name for name in self._top if name.endswith("_config") and name != "text_config"]

    @property
    def rope_parameters(self) -> Mapping[str, Any]:
        """Of the rotary embedding; older files have other names in it."""
        found = self._find("rope_parameters") or {}
        assert isinstance(found, Mapping)
        kind = found.get("rope_type", found.get("type"))
        return found if kind is None else {**found, "rope_type": _ROPE_ALIASES.get(kind, kind)}

    def get_text_config(self) -> "ModelConfig":
        """Its own keys: those of the text are at hand already."""
        return self

    def _find(self, name: str) -> Any:
        for each in (name, *_ALIASES.get(name, ())):
            if (value := self._values.get(each)) is not None:
                return value
        return None

    def _refuse(self) -> None:
        kind = self.model_type
        refuse_unservable(self)
        if quantization := self._find("quantization_config"):
            method = quantization.get("quant_method", "some method")
            raise ValueError(
                f"{self.source}: got weights quantised by {method} but expected plain ones: "
                f"quantised weights are not served yet"
            )
        if kind not in FAMILIES:
            raise ValueError(
                f"{self.source}: got a {kind!r} model but expected one of {', '.join(FAMILIES)}"
            )


def read_model_config(path: Path) -> ModelConfig:
    """The config.json at this path or in this directory; ValueError in one line."""
    file = path / "config.json" if path.is_dir() else path
    try:
        values: Any = orjson.loads(file.read_bytes())
    except OSError as error:
        raise ValueError(f"cannot read {file}: {error.strerror}") from error
    except orjson.JSONDecodeError as error:
        raise ValueError(f"{file} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{file} holds {type(values).__name__} but expected an object")
    return ModelConfig(values, source=str(file))
