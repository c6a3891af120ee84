"""Where traces go and how many are kept."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TelemetryConfig:
    """Settings of the tracer of one process."""

    otlp_endpoint: str = ""  # host:port or URL of an OTLP/gRPC collector; empty = no export
    sample_ratio: float = 1.0  # share of new traces kept; begun elsewhere: as decided there

    def __post_init__(self) -> None:
        """Refuse a share that is none."""
        if not 0.0 <= self.sample_ratio <= 1.0:
            raise ValueError(f"Got {self.sample_ratio = } but expected a value in [0, 1]")
