"""Workers die, freeze, are cut off, come back."""

from tests.chaos.checks import (
    hits_at_most,
    only_these_failed,
    recovered_within,
    some_were_hit,
    stalls_below,
    the_victims_live,
    the_victims_were_replaced,
    wrong_guesses_at_most,
)
from tests.chaos.events import (
    Ask,
    Flow,
    Freeze,
    Kill,
    KillCacheOf,
    Mend,
    Moved,
    NotReady,
    Partition,
    Ready,
    Slow,
    Strike,
    Thaw,
    Whole,
    fault,
)
from tests.chaos.load import ASIDE, Load
from tests.chaos.scenario import Scenario

DOOMED = frozenset({"doomed"})

WORKERS = (
    Scenario(
        name="a decode worker is killed in the middle of streams",
        rows=["R1", "R21"],
        load=Load(num_clients=6),
        events=[Slow("decode"), Flow(), Kill("decode"), Flow(200), Whole(), Flow(100)],
        checks=[recovered_within(4.0), the_victims_were_replaced],
        quiet_s=20.0,
        is_core=True,
    ),
    Scenario(
        name="a prefill worker is killed while it computes a prompt",
        rows=["R2"],
        events=[
            Strike(fault("prefill_step", "kill", pool="prefill", request_label="doomed")),
            Flow(),
            Ask("long prompt", label="doomed"),
        ],
        checks=[some_were_hit],
        quiet_s=20.0,
    ),
    Scenario(
        name="a prefill worker is killed while it hands KV over",
        rows=["R2"],
        events=[
            Strike(fault("kv_send", "kill", request_label="doomed")),
            Flow(),
            Ask("long prompt", label="doomed"),
        ],
        checks=[some_were_hit],
        quiet_s=20.0,
    ),
    Scenario(
        name="a prefill worker is killed after it handed KV over",
        rows=["R2"],
        events=[Slow("decode"), Flow(), Kill("prefill"), Flow(200), Whole(), Flow(100)],
        checks=[the_victims_were_replaced],
        quiet_s=20.0,
    ),
    Scenario(
        name="a prefill worker comes back with an empty cache",
        rows=["R10"],
        events=[
            *[Ask(ASIDE, label="before")] * 2,
            KillCacheOf(ASIDE),
            *[Ask(ASIDE, label="after")] * 3,
            Whole(),
            *[Ask(ASIDE, label="after")] * 3,
        ],
        checks=[wrong_guesses_at_most(1, label="after"), the_victims_were_replaced],
        quiet_s=20.0,
    ),
    Scenario(
        name="both prefill workers are killed and requests wait for the next ones",
        rows=["R2", "R13"],
        events=[Flow(), Kill("prefill"), Kill("prefill"), NotReady(), Ready(), Flow(100)],
        checks=[the_victims_were_replaced],
        quiet_s=25.0,
    ),
    Scenario(
        name="a decode worker freezes in the middle of streams and thaws",
        rows=["R3"],
        load=Load(num_clients=6),
        # Thawed sooner, it would go on as if nothing had been.
        events=[
            Slow("decode"),
            Flow(),
            Freeze("decode"),
            Moved(),
            Flow(100),
            Thaw(),
            Whole(),
            Flow(100),
        ],
        checks=[recovered_within(7.0), the_victims_live],
        quiet_s=8.0,
        is_core=True,
    ),
    Scenario(
        name="a prefill worker freezes in the middle of a hand-over and thaws",
        rows=["R3"],
        events=[
            Strike(fault("kv_send", "freeze", request_label="doomed")),
            Flow(),
            Ask("long prompt", label="doomed"),
            Thaw(),
            Whole(),
            Flow(60),
        ],
        checks=[some_were_hit, stalls_below(7.0)],
        quiet_s=8.0,
        is_core=True,
    ),
    Scenario(
        name="a decode worker is cut off from the control plane for a while",
        rows=["R3", "R4"],
        load=Load(num_clients=6),
        # Its open streams still bring tokens, which are signs of life: none of them need move.
        events=[Slow("decode"), Flow(), Partition("decode"), Flow(300), Mend(), Whole(), Flow(60)],
        checks=[the_victims_live],
        quiet_s=6.0,
    ),
    Scenario(
        name="a prefill worker is cut off from the control plane for a while",
        rows=["R3", "R4"],
        events=[Flow(), Partition("prefill"), Flow(300), Mend(), Whole(), Flow(60)],
        checks=[the_victims_live],
        quiet_s=6.0,
    ),
    Scenario(
        name="a poison request kills every decode worker it meets",
        rows=["F4"],
        events=[
            Strike(fault("decode_step", "kill", request_label="doomed", count=0)),
            Ask("greedy", label="doomed"),
        ],
        checks=[only_these_failed("doomed"), hits_at_most(4)],
        may_fail=DOOMED,
        has_spare=False,
        quiet_s=60.0,
    ),
)
