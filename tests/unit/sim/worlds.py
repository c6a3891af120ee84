"""Small simulated machines with round numbers."""

from typing import Any

from router.worker_view import PREFILL, WorkerKey
from rpc.feed_pace import FeedPace
from sim.agenda import Agenda
from sim.engine import SimEngine
from sim.hardware import Hardware
from sim.job import Job
from sim.worker import SimWorker

BLOCK_SIZE = 10
# 1,000 prompt tokens a second in chunks of 100, a token every 10 ms, 1 MB/s of KV at 1 kB a token.
PLAIN: dict[str, Any] = {
    "fixed_s": 0.0,
    "weights_s": 0.01,
    "token_s": 0.001,
    "attention_s": 0.0,
    "request_s": 0.0,
    "kv_token_s": 0.0,
    "num_kv_tokens": 10_000,
    "kv_bytes_per_token": 1000,
    "link_bytes_per_s": 1e6,
    "link_latency_s": 0.0,
    "rpc_latency_s": 0.0,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 100,
    "max_model_len": 5000,
    "restart_s": 1.0,
}


def hardware(**facts: Any) -> Hardware:
    return Hardware(**{**PLAIN, **facts})


def engine(agenda: Agenda, **facts: Any) -> SimEngine:
    return SimEngine(hardware(**facts), agenda, block_size=BLOCK_SIZE, on_change=lambda: None)


def worker(agenda: Agenda, number: int = 0, pool: str = PREFILL, **facts: Any) -> SimWorker:
    key = WorkerKey(f"{pool}-{number}", 1)
    pace = FeedPace()
    return SimWorker(key, pool, hardware(**facts), agenda, block_size=BLOCK_SIZE, pace=pace)


class Log:
    """When things happened to jobs."""

    def __init__(self, agenda: Agenda) -> None:
        self.agenda = agenda
        self.chunks: list[tuple[float, int]] = []
        self.first_token_s: float | None = None
        self.ended_s: float | None = None

    def job(
        self, num_prompt: int, num_output: int, *, start: int = 0, is_kept: bool = False
    ) -> Job:
        """A prompt of its own, or one that begins like others with the same `start`."""
        return Job(
            names=[start + n for n in range(num_prompt // BLOCK_SIZE)],  # type: ignore[misc]
            num_prompt_tokens=num_prompt,
            num_output_tokens=num_output,
            on_chunk=lambda job: self.chunks.append((self.agenda.now_s, job.num_computed)),
            on_token=lambda _: setattr(self, "first_token_s", self.agenda.now_s),
            on_end=lambda _: setattr(self, "ended_s", self.agenda.now_s),
            is_kept=is_kept,
        )


def run(agenda: Agenda) -> None:
    """Until nothing is planned."""
    agenda.run(lambda: False)
