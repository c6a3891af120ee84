"""How the suite is shared out when it runs on several cores."""

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep a file's tests together and in order; one process alone starts Ray clusters."""
    for item in items:
        group = "ray" if item.get_closest_marker("ray") else item.path.as_posix()
        item.add_marker(pytest.mark.xdist_group(group))
