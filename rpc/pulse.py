"""When an engine counts as dead or frozen.

What its thread waited for a core does not count: a machine that has too much to do gets no better
by replacing what runs there, which only adds the work of a start.
"""

from rpc.worker_load import HeartbeatLike

STALE_AFTER_S = 2.0
STALE_AFTER_STEPS = 4.0  # times the predicted duration of the running step


def check_pulse(heartbeat: HeartbeatLike, failure: BaseException | None) -> None:
    """Raise RuntimeError when the engine gave up or shows no life."""
    if failure is not None:
        raise RuntimeError("the engine gave up") from failure
    limit_s = max(STALE_AFTER_S, STALE_AFTER_STEPS * heartbeat.predicted_step_s)
    if heartbeat.age_s - heartbeat.waited_s > limit_s:
        raise RuntimeError(f"the engine showed no life for {heartbeat.age_s:.1f} s")
