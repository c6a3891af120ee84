"""Loads the compiled library of this package."""

import logging
from functools import cache
from typing import Any

import torch

from engine.native.library_file import find_library

logger = logging.getLogger(__name__)


@cache
def load_library() -> bool:
    """Make `torch.ops.relevo` known; False where the library was not built."""
    path = find_library()
    if path is None:
        logger.warning(
            "no compiled attention for this CPU, using torch's own: "
            "'make setup' builds it where there is a C++ compiler"
        )
        return False
    operations: Any = torch.ops
    operations.load_library(str(path))
    return True
