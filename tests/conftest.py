"""Random examples are the same each time in the short form; `make soak` draws new ones.

None has a deadline: how long one takes says more of what else the machine does.
"""

import importlib.util
import os

from tests.long_form import IS_LONG
from workers import openmp

# Engines in tests share the cores with each other and with what tests start, as workers do.
openmp.apply(None, os.environ)

# The tests of GPUs run where it is not installed.
if importlib.util.find_spec("hypothesis"):
    from hypothesis import settings

    settings.register_profile("short", derandomize=True, deadline=None)
    settings.register_profile("long", print_blob=True, deadline=None)
    settings.load_profile("long" if IS_LONG else "short")
