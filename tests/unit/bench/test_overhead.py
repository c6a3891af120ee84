"""What counts as the rate of streams that run side by side."""

import pytest

from bench.overhead import tokens_per_s


def test_only_the_time_when_all_streams_run_counts() -> None:
    early = [float(second) for second in range(10)]  # its last token comes at 9 s
    late = [each + 2.0 for each in early]  # its first at 2 s
    assert tokens_per_s([early, late]) == 14 / 7


def test_streams_that_hardly_meet_have_no_rate() -> None:
    early = [float(second) for second in range(10)]
    for delay_s in (6.0, 20.0):
        with pytest.raises(RuntimeError, match="shorter prompts"):
            tokens_per_s([early, [each + delay_s for each in early]])
