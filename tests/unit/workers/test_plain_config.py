"""Nested configuration from plain data."""

from dataclasses import dataclass, field

import pytest

from workers.plain_config import from_plain, to_plain


@dataclass(frozen=True, slots=True, kw_only=True)
class Inner:
    block_size: int = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Outer:
    inner: Inner
    optional: Inner | None = None
    names: list[str] = field(default_factory=list)


def test_plain_data_makes_the_round_trip() -> None:
    config = Outer(inner=Inner(block_size=4), optional=Inner(), names=["a"])
    assert from_plain(Outer, to_plain(config)) == config
    assert from_plain(Outer, {"inner": {}, "optional": None}) == Outer(inner=Inner())


def test_an_unknown_key_is_an_error_that_names_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"inner\.block_sise; did you mean block_size\?"):
        from_plain(Outer, {"inner": {"block_sise": 8}})


def test_a_missing_key_and_a_wrong_shape_are_errors() -> None:
    with pytest.raises(ValueError, match="incomplete"):
        from_plain(Outer, {})
    with pytest.raises(ValueError, match="expected a table"):
        from_plain(Outer, {"inner": 3})
