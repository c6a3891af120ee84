"""The load of one worker as JSON."""

from router.request import LoadReport


def load_to_dict(report: LoadReport) -> dict[str, object]:
    """Write down a worker's last load message."""
    load = report.load
    blocks = load.blocks
    return {
        "worker_id": report.worker.worker_id,
        "incarnation": report.worker.incarnation,
        "pool": report.pool,
        "state": load.state,
        "pid": load.pid,
        "node_id": load.node_id,
        "num_running": load.num_running,
        "num_waiting": load.num_waiting,
        "num_transferring": load.num_transferring,
        "num_waiting_uncached_tokens": load.num_waiting_uncached_tokens,
        "blocks": {
            "free": blocks.free,
            "cached": blocks.cached,
            "used": blocks.used,
            "held": blocks.held,
            "quarantined": blocks.quarantined,
            "total": blocks.total,
        },
        "prefill_tokens_per_s": load.prefill_tokens_per_s,
        "step_s": load.step_s,
        "heartbeat_age_s": load.heartbeat_age_s,
        "links": [
            {
                "peer": link.peer_id,
                "state": link.state,
                "generation": link.generation,
                "backend": link.backend,
                "reason": link.reason,
                "bandwidth_bytes_per_s": link.bandwidth_bytes_per_s,
                "latency_s": link.latency_s,
            }
            for link in load.links
        ],
    }
