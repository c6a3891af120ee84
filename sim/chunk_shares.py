"""How the prompt tokens of one simulated step are shared out: the rule of `engine/chunk_shares.py`.

The first that cannot be finished gets at least half of what is left, the other half is for prompts
that can be finished with it.
"""

from sim.job import Job


class ChunkShares:
    """Gives prompts pieces of a step, in the order in which they ask."""

    def __init__(self, num_tokens: int) -> None:
        self._num_left = num_tokens
        self._num_kept = 0  # for the long one
        self._long: Job | None = None
        self._chunks: list[tuple[Job, int]] = []

    def admits(self, num_tokens: int) -> bool:
        """Whether one with this much of its prompt to compute would get a piece."""
        return self._num_left > 0 and (self._long is None or num_tokens <= self._num_left)

    def give(self, job: Job) -> None:
        """Give it its piece, if there is one for it."""
        if not self.admits(job.num_left):
            return
        if job.num_left <= self._num_left:
            self._chunks.append((job, job.num_left))
            self._num_left -= job.num_left
        else:
            self._long = job
            self._num_kept = self._num_left - self._num_left // 2
            self._num_left //= 2

    def close(self) -> list[tuple[Job, int]]:
        """All pieces; what is left goes to the long one."""
        if self._long is not None:
            self._chunks.append((self._long, self._num_kept + self._num_left))
        return self._chunks
