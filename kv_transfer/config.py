"""What an operator can set about the KV plane."""

from dataclasses import dataclass

from kv_transfer.place import REACHES

BACKENDS = ("auto", "gloo", "nccl", "shared_memory")


@dataclass(frozen=True, slots=True, kw_only=True)
class KVTransferConfig:
    """Settings of the KV links of one worker; the same on both sides of a link."""

    # auto: for each pair nccl between two GPUs, shared_memory on one host, else gloo
    backend: str = "auto"
    # bounds one granted operation, one fetch call, and each step of building a link
    transfer_timeout_s: float = 5.0
    # how long a prefill worker keeps KV that nobody follows any more
    lease_s: float = 10.0
    # links a decode worker keeps
    max_links: int = 16
    # how far they may go: any, or only within a zone or a node
    reach: str = "any"
    # share of the fetched ranges whose digest is compared; one in a hundred costs about a hundredth
    # of the bandwidth and finds what corrupts for longer than a moment
    digest_sample: float = 0.01
    # network interface the links bind to; empty: the loopback address
    interface: str = ""
    # Only empty is accepted: neither Gloo nor NCCL takes a port, both listen where the system's own
    # range lets them. The rendezvous needs none; the workers' own ports are `rpc.port_range`.
    port_range: str = ""

    def __post_init__(self) -> None:
        """Refuse values no link could work with."""
        if self.backend not in BACKENDS:
            raise ValueError(f"Got {self.backend = } but expected one of {BACKENDS}")
        if self.transfer_timeout_s <= 0 or self.lease_s <= 0:
            raise ValueError(
                f"Got {self.transfer_timeout_s = } and {self.lease_s = } but expected more than 0"
            )
        if self.reach not in REACHES:
            raise ValueError(f"Got {self.reach = } but expected one of {REACHES}")
        if self.max_links < 1:
            raise ValueError(f"Got {self.max_links = } but expected at least 1")
        if not 0.0 <= self.digest_sample <= 1.0:
            raise ValueError(f"Got {self.digest_sample = } but expected a share in [0, 1]")
        if self.port_range:
            raise ValueError(
                f"Got {self.port_range = } but expected it empty: the links' ports are chosen by"
                " the operating system; set net.ipv4.ip_local_port_range instead"
            )

    @property
    def may_share_memory(self) -> bool:
        """Whether a peer on the same host may be let read the pool itself."""
        return self.backend in ("auto", "shared_memory")
