"""Steps, messages and hand-overs fail; clients misbehave."""

from tests.chaos.checks import (
    hits_at_most,
    metric_grew,
    only_these_failed,
    some_were_hit,
    stalls_below,
)
from tests.chaos.clients import (
    CancelStorm,
    Crowd,
    CutClients,
    Dribble,
    HalfOpenClients,
    NeverFits,
    Nonsense,
    ShortDeadline,
    SlowReaders,
)
from tests.chaos.events import (
    Ask,
    Flow,
    NotReady,
    Ready,
    Replaced,
    Slow,
    Strike,
    Wait,
    Whole,
    fault,
)
from tests.chaos.load import Load
from tests.chaos.scenario import Scenario

DOOMED = frozenset({"doomed"})

STEPS = (
    Scenario(
        name="one row of a batch fails in the sampler",
        rows=["F2"],
        events=[
            Strike(fault("sample", "raise", request_label="doomed", count=0)),
            Flow(),
            Ask("greedy", label="doomed"),
        ],
        checks=[only_these_failed("doomed")],
        may_fail=DOOMED,
    ),
    Scenario(
        name="one text cannot be put together",
        rows=["F2"],
        events=[
            Strike(fault("detokenize", "raise", request_label="doomed")),
            Flow(),
            Ask("greedy", label="doomed"),
        ],
        checks=[only_these_failed("doomed")],
        may_fail=DOOMED,
    ),
    Scenario(
        name="a forward pass fails with its whole batch",
        rows=["F3"],
        events=[Flow(), Strike(fault("decode_step", "raise", pool="decode")), Flow(100)],
        checks=[some_were_hit, stalls_below(2.0)],
    ),
    Scenario(
        name="an engine fails step after step and is replaced",
        rows=["F3", "R12"],
        events=[
            Flow(),
            Strike(fault("decode_step", "raise", worker="decode-0", count=5)),
            Replaced("decode-0"),
            Flow(60),
        ],
        checks=[some_were_hit],
        quiet_s=25.0,
    ),
    Scenario(
        name="every decode worker refuses a request by an error",
        rows=["R9"],
        events=[
            Strike(fault("admission", "raise", pool="decode", request_label="doomed", count=0)),
            Flow(),
            *[Ask("greedy", label="doomed")] * 5,
        ],
        checks=[only_these_failed("doomed"), hits_at_most(5 * 4)],
        may_fail=DOOMED,
    ),
    Scenario(
        name="both engines hang and the cluster says that it is not ready",
        rows=["R12"],
        events=[
            Flow(),
            Strike(
                fault("engine_heartbeat", "freeze", worker="decode-0", delay_s=6.0),
                fault("engine_heartbeat", "freeze", worker="decode-1", delay_s=6.0),
            ),
            NotReady(),
            Ready(),
            Flow(60),
        ],
        has_spare=False,
        quiet_s=12.0,
    ),
)

MESSAGES = (
    Scenario(
        name="control messages are lost and doubled and late",
        rows=["R4"],
        events=[
            Strike(
                fault("control_message", "drop", pool="decode", after=5, count=2),
                fault("control_message", "duplicate", after=20, count=10),
                fault("control_message", "delay", after=50, count=10, delay_s=0.3),
                fault("control_message", "drop", pool="prefill", after=30, count=2),
            ),
            Flow(400),
        ],
    ),
    Scenario(
        name="a chunk of KV is corrupted on its way",
        rows=["R15"],
        events=[
            Strike(
                fault("kv_send", "corrupt", request_label="doomed"),
                fault("kv_recv", "corrupt", request_label="doomed", after=3),
            ),
            Flow(),
            *[Ask("long prompt", label="doomed")] * 3,
        ],
        checks=[metric_grew("relevo_kv_digest_mismatches_total"), some_were_hit],
    ),
    Scenario(
        name="a hand-over fails on either side",
        rows=["R2", "R15"],
        events=[
            Strike(
                fault("kv_send", "raise", request_label="doomed"),
                fault("kv_recv", "raise", request_label="doomed", after=2),
                fault("kv_send", "drop", request_label="doomed", after=4),
            ),
            Flow(),
            *[Ask("long prompt", label="doomed")] * 4,
            Whole(),
        ],
        checks=[some_were_hit],
        quiet_s=8.0,
    ),
)

CLIENTS = (
    Scenario(
        name="clients ask for nonsense beside a canary",
        rows=["F1", "F5"],
        events=[Flow(), Nonsense()],
    ),
    Scenario(
        name="a storm of clients that leave at once",
        rows=["R5"],
        load=Load(num_clients=2),
        events=[Flow(), CancelStorm(), Wait(0.5)],
        may_refuse=True,
    ),
    Scenario(
        name="the network between clients and ingress is cut and half open and slow",
        rows=["R5", "R14"],
        load=Load(num_clients=2),
        events=[Flow(), CutClients(), HalfOpenClients(), Dribble()],
        quiet_s=6.0,
    ),
    Scenario(
        name="clients read ten bytes a second",
        rows=["R14"],
        load=Load(num_clients=2),
        events=[Flow(), SlowReaders(), Flow()],
        quiet_s=7.0,
    ),
    Scenario(
        name="a deadline passes in the middle of an answer",
        rows=["R6"],
        load=Load(num_clients=2),
        events=[Slow("decode"), Flow(), ShortDeadline(), ShortDeadline(0.05)],
    ),
    Scenario(
        name="far more clients at once than may wait",
        rows=["R7"],
        load=Load(num_clients=2),
        events=[Slow("decode"), Flow(), Crowd(), Flow()],
        may_refuse=True,
        quiet_s=6.0,
    ),
    Scenario(
        name="a request that can never fit is told so at once",
        rows=["R8"],
        events=[Flow(), NeverFits(), Flow()],
    ),
    Scenario(
        name="the pools are too small for what is asked",
        rows=["R21"],
        load=Load(num_clients=10, num_tokens=200, questions=("greedy", "long prompt", "sampled")),
        events=[Flow(1500)],
        checks=[metric_grew("relevo_preemptions_total")],
        quiet_s=15.0,
    ),
)
