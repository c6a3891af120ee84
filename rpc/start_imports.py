"""Imports what a worker is made of: half of its start."""

import gc
import importlib
from types import ModuleType


def import_whole(name: str) -> ModuleType:
    """Import a module and all below it, without looking for garbage meanwhile.

    Hundreds of thousands of objects come to stay: each look at them is time lost, a tenth of the
    whole. Frozen, they are also passed over by every later look, in the middle of a step.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        return importlib.import_module(name)
    finally:
        gc.freeze()
        if was_on:
            gc.enable()
