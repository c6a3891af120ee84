"""Bounds and objectives of a pool that grows and shrinks with its load."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolScaling:
    """What both kinds of pool have: bounds, and how long a wish must last."""

    min: int = 1  # workers
    max: int = 1
    up_delay_s: float = 5.0  # more are started when they were needed for so long
    down_delay_s: float = 120.0  # fewer are kept when no more were needed for so long

    def __post_init__(self) -> None:
        """Refuse values that cannot work."""
        if self.min < 1:
            raise ValueError(
                f"Got {self.min = } but expected at least 1: a start takes longer than a client"
                " waits"
            )
        if self.max < self.min:
            raise ValueError(f"Got {self.max = } but expected at least {self.min = }")
        if self.up_delay_s < 0 or self.down_delay_s < 0:
            raise ValueError(
                f"Got {self.up_delay_s = } and {self.down_delay_s = } but expected at least 0"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillScaling(PoolScaling):
    """When prompts wait too long for their turn, or prefill workers are busy most of the time."""

    ttft_s: float = 2.0  # objective; half of it may pass before a prompt's own turn
    busy_share: float = 0.7  # of the time that prefill workers compute

    def __post_init__(self) -> None:
        """Refuse values that cannot work."""
        PoolScaling.__post_init__(self)
        if not self.ttft_s > 0:
            raise ValueError(f"Got {self.ttft_s = } but expected a positive number")
        if not 0 < self.busy_share <= 1:
            raise ValueError(f"Got {self.busy_share = } but expected more than 0, at most 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeScaling(PoolScaling):
    """When streams grow slow, or KV blocks or places in the batch become few."""

    itl_s: float = 0.05  # objective of the time between two tokens of a stream
    kv_share: float = 0.8  # of the KV blocks in use or promised
    seqs_share: float = 0.9  # of the places in the batches

    def __post_init__(self) -> None:
        """Refuse values that cannot work."""
        PoolScaling.__post_init__(self)
        if not self.itl_s > 0:
            raise ValueError(f"Got {self.itl_s = } but expected a positive number")
        if not (0 < self.kv_share <= 1 and 0 < self.seqs_share <= 1):
            raise ValueError(
                f"Got {self.kv_share = } and {self.seqs_share = }"
                " but expected more than 0, at most 1"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingConfig:
    """Both pools; None keeps a pool as it is."""

    prefill: PrefillScaling | None = None
    decode: DecodeScaling | None = None

    @property
    def is_on(self) -> bool:
        """Whether anything grows or shrinks."""
        return self.prefill is not None or self.decode is not None

    def pool(self, name: str) -> PoolScaling | None:
        """By the pool's name."""
        found: PoolScaling | None = getattr(self, name)
        return found
