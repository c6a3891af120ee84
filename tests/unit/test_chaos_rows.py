"""Each row of the threats is shown by something that is there."""

import re
from pathlib import Path

from tests.chaos.scenarios import SCENARIOS

README = Path("tests/chaos/README.md")
ROWS = [f"F{number}" for number in range(1, 6)] + [f"R{number}" for number in range(1, 22)]


def table() -> dict[str, str]:
    return dict(re.findall(r"^\| ([FR]\d+) \| (.+) \|$", README.read_text(), re.MULTILINE))


def test_every_row_is_there_once_and_in_order() -> None:
    assert list(table()) == ROWS


def test_the_table_names_each_scenario_in_its_rows_and_nowhere_else() -> None:
    for scenario in SCENARIOS:
        named = {row for row, shown_by in table().items() if scenario.name in shown_by.split("; ")}
        assert named == set(scenario.rows), scenario.name


def test_every_file_that_shows_a_row_exists() -> None:
    paths = re.findall(r"`(tests/\S+)`", " ".join(table().values()))
    assert paths
    assert [path for path in paths if not Path(path).is_file()] == []
