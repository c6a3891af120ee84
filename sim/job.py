"""One request as a simulated worker sees it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from router.block_name import BlockName
from sim.block_cache import Lease


@dataclass(slots=True, eq=False, kw_only=True)
class Job:
    """A prompt to be computed, tokens to be generated, or both.

    [0, num_cached) found in the cache   [num_cached, num_computed) computed   the rest to come
    """

    names: Sequence[BlockName]  # of the prompt's full blocks
    num_prompt_tokens: int
    num_output_tokens: int  # to be generated here; a prefill worker makes the first one only
    on_chunk: Callable[["Job"], None]  # some of the prompt was computed
    on_token: Callable[["Job"], None]  # the first token of this worker
    on_end: Callable[["Job"], None]  # the last one
    is_kept: bool = False  # its blocks stay after its end, until `release`
    lease: Lease = field(default_factory=Lease)
    num_cached: int = 0
    num_computed: int = 0
    num_generated: int = 0
    started_at_step: int = 0  # number of the decode step that gave it its first one there
    is_over: bool = False

    @property
    def num_left(self) -> int:
        """Prompt tokens yet to be computed."""
        return self.num_prompt_tokens - self.num_computed

    def num_pairs(self, num_tokens: int) -> int:
        """(token, earlier token) pairs of its next tokens."""
        return num_tokens * self.num_computed + num_tokens * num_tokens // 2
