"""Matplotlib without a screen; only those who draw need it."""

from pathlib import Path
from typing import Any


def pyplot() -> Any:
    """The plotting module; ValueError says how to get it."""
    try:
        import matplotlib as mpl  # noqa: PLC0415 - only pictures need it
    except ImportError as error:
        raise ValueError("pictures need matplotlib: pip install matplotlib") from error
    mpl.use("agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415 - after the choice of its backend

    return plt


def save(figure: Any, path: Path) -> None:
    """Write a figure and forget it."""
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot().close(figure)
