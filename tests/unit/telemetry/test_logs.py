"""One line per message, with the request id."""

import asyncio
import io
import logging

import pytest

from telemetry import logs


@pytest.fixture
def lines():
    """Lines written through our handler."""
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    logs.set_up_logging("INFO")
    (ours,) = [each for each in root.handlers if each not in before]
    stream = io.StringIO()
    ours.setStream(stream)
    yield lambda: stream.getvalue().splitlines()
    root.removeHandler(ours)
    root.setLevel(level)


def test_setting_up_twice_logs_once(lines):
    logs.set_up_logging("INFO")
    logging.getLogger("x").info("hello")
    assert len(lines()) == 1


def test_a_line_names_the_request_and_only_inside_its_scope(lines):
    with logs.request_scope("req-1"):
        logging.getLogger("x").warning("inside %d", 1)
    logging.getLogger("x").warning("outside")
    assert lines()[0].endswith("x [req-1] inside 1")
    assert lines()[1].endswith("x [-] outside")


async def test_a_task_inherits_the_request_and_neighbours_do_not(lines):
    async def work(name):
        with logs.request_scope(name):
            await asyncio.sleep(0)
            await asyncio.create_task(asyncio.to_thread(logging.getLogger("x").info, name))

    await asyncio.gather(work("a"), work("b"))
    assert {line.rsplit("x ", 1)[1] for line in lines()} == {"[a] a", "[b] b"}


def test_a_client_cannot_forge_a_second_line(lines):
    with logs.request_scope("id\nERROR forged"):
        logging.getLogger("x").info("label %s", "a\r\nINFO forged \x1b[2J")
    assert len(lines()) == 1
    assert "a\\x0d\\x0aINFO forged \\x1b[2J" in lines()[0]
    assert "id\\x0aERROR forged" in lines()[0]


def test_a_traceback_stays_readable(lines):
    try:
        raise KeyError("x")
    except KeyError:
        logging.getLogger("x").exception("failed")
    assert lines()[-1] == "KeyError: 'x'"
    assert len(lines()) > 2
