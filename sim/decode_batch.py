"""The running requests of a simulated engine: all get a token in every step.

Kept so that a step costs the same however many run: ends by the number of their step, KV as a sum.
"""

import heapq
import itertools
import math
from dataclasses import dataclass, replace

from sim.hardware import Hardware
from sim.job import Job


@dataclass(slots=True, eq=False, kw_only=True)
class Stretch:
    """Steps in a row that only decode; each is a little longer than the one before."""

    start_s: float
    first_step_s: float
    growth_s: float  # of each step over the one before
    num_steps: int
    is_cut: bool = False  # another one ends in its place

    @property
    def end_s(self) -> float:
        """When its last step ends."""
        return self._end_of(self.num_steps)

    def _end_of(self, num_steps: int) -> float:
        grown_s = self.growth_s * num_steps * (num_steps - 1) / 2
        return self.start_s + num_steps * self.first_step_s + grown_s

    def cut(self, now_s: float) -> "Stretch":
        """The part of it that ends with the step that runs now."""
        num_steps = self._first_ending_after(now_s)
        return replace(self, num_steps=min(max(num_steps, 1), self.num_steps))

    def _first_ending_after(self, now_s: float) -> int:
        passed_s = now_s - self.start_s
        linear_s, half_growth_s = self.first_step_s - self.growth_s / 2, self.growth_s / 2
        if half_growth_s > 0.0:
            root = math.sqrt(linear_s * linear_s + 4.0 * half_growth_s * passed_s)
            num_steps = math.ceil((root - linear_s) / (2.0 * half_growth_s))
        else:
            num_steps = math.ceil(passed_s / self.first_step_s)
        # The root is rounded: its neighbour may be the one.
        while num_steps > 1 and self._end_of(num_steps - 1) >= now_s:
            num_steps -= 1
        while self._end_of(num_steps) < now_s:
            num_steps += 1
        return num_steps


class DecodeBatch:
    """Owns the running jobs. Invariant: `num_kv_tokens` is the sum over them."""

    def __init__(self, hardware: Hardware) -> None:
        self.num_kv_tokens = 0
        self._hardware = hardware
        self._ends: list[tuple[int, int, Job]] = []  # by the step of their last token
        self._numbers = itertools.count()
        self._step_number = 0

    def __len__(self) -> int:
        return len(self._ends)

    def add(self, job: Job) -> None:
        """Its next token comes with the next step."""
        job.started_at_step = self._step_number + 1
        ends_at_step = self._step_number + job.num_output_tokens - job.num_generated
        heapq.heappush(self._ends, (ends_at_step, next(self._numbers), job))
        self.num_kv_tokens += job.num_prompt_tokens + job.num_generated

    def remove(self, job: Job) -> None:
        """Before its end."""
        self._ends = [entry for entry in self._ends if entry[2] is not job]
        heapq.heapify(self._ends)
        self._leave(job)

    def next_stretch(self, now_s: float) -> Stretch:
        """The steps until the next of them ends."""
        num_decodes = len(self._ends)
        return Stretch(
            start_s=now_s,
            first_step_s=self._hardware.step_s(
                num_decodes=num_decodes,
                num_kv_tokens=self.num_kv_tokens,
                num_chunk_tokens=0,
                num_pairs=0,
            ),
            growth_s=num_decodes * self._hardware.kv_token_s,
            num_steps=self._ends[0][0] - self._step_number,
        )

    def step(self, num_steps: int) -> list[Job]:
        """So many steps were done; those that have all their tokens leave."""
        self._step_number += num_steps
        self.num_kv_tokens += num_steps * len(self._ends)
        ended = []
        while self._ends and self._ends[0][0] <= self._step_number:
            _, _, job = heapq.heappop(self._ends)
            self._leave(job)
            ended.append(job)
        return ended

    def num_generated(self, job: Job) -> int:
        """Tokens a running job has so far; those of a stretch come with its end."""
        num_steps = self._step_number - job.started_at_step + 1 if job.started_at_step else 0
        return job.num_generated + num_steps

    def _leave(self, job: Job) -> None:
        self.num_kv_tokens -= job.num_prompt_tokens + self.num_generated(job)

    def check_integrity(self) -> None:
        """Assert that the sum is right."""
        num_kv_tokens = sum(
            job.num_prompt_tokens + self.num_generated(job) for _, _, job in self._ends
        )
        assert self.num_kv_tokens == num_kv_tokens, (self.num_kv_tokens, num_kv_tokens)
