"""Where traces go, how many are kept, and what of them."""

from dataclasses import dataclass, replace
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class TelemetryConfig:
    """Settings of the tracer of one process."""

    otlp_endpoint: str = ""  # host:port or URL of an OTLP/gRPC collector; empty = no export
    sample_ratio: float = 1.0  # share of new traces exported; begun elsewhere: as decided there
    slow_first_token_s: float = 3.0  # exported anyway when the first token took so long; 0 = never
    keep_traces: int = 256  # last requests whose spans an ingress remembers; 0 = none
    capture_content: bool = False  # what was asked and answered, in the request's span; else never
    request_log_file: str = ""  # a JSON line per finished request; empty = into the ordinary log

    def __post_init__(self) -> None:
        """Refuse a share that is none, and numbers below 0."""
        if not 0.0 <= self.sample_ratio <= 1.0:
            raise ValueError(f"Got {self.sample_ratio = } but expected a value in [0, 1]")
        if not self.slow_first_token_s >= 0.0:
            raise ValueError(f"Got {self.slow_first_token_s = } but expected 0 or more seconds")
        if not 0 <= self.keep_traces <= 10_000:
            raise ValueError(f"Got {self.keep_traces = } but expected a number from 0 to 10000")

    def of_one(self, name: str) -> "TelemetryConfig":
        """Of one of several processes on a machine: the rotation of a log knows one writer only."""
        if not self.request_log_file:
            return self
        file = Path(self.request_log_file)
        own = file.with_name(f"{file.stem}.{name}{file.suffix}")
        return replace(self, request_log_file=str(own))
