from rpc.start_clock import StartClock, describe_parts
from tests.fakes import FakeClock


def test_the_parts_of_a_start_add_up() -> None:
    now = FakeClock()
    clock = StartClock(now)
    for part, seconds in (("imports", 3.0), ("weights", 0.5), ("imports", 1.0)):
        now.advance(seconds)
        clock.lap(part)
    assert clock.parts_s == {"imports": 4.0, "weights": 0.5}
    assert describe_parts(clock.parts_s) == "4.5 s: imports 4.0, weights 0.5"
