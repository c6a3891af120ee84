"""Random examples are the same each time in the short form; `make soak` draws new ones.

None has a deadline: how long one takes says more of what else the machine does.
"""

import importlib.util

from tests.long_form import IS_LONG

# The tests of GPUs run where it is not installed.
if importlib.util.find_spec("hypothesis"):
    from hypothesis import settings

    settings.register_profile("short", derandomize=True, deadline=None)
    settings.register_profile("long", print_blob=True, deadline=None)
    settings.load_profile("long" if IS_LONG else "short")
