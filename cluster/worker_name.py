"""What a worker replica calls itself; asked in the replica's own process."""

from ray import serve


def ranked(pool: str) -> str:
    """Such as decode-0: Serve's rank of the replica; a successor takes over rank and name."""
    rank = serve.get_replica_context().rank
    assert rank is not None
    return f"{pool}-{rank.rank}"


def unique(pool: str) -> str:
    """Such as decode-8h2kx0qa: Serve's own id of the replica.

    For pools that shrink: Serve then hands the ranks of running replicas out anew, and a rank that
    a later replica gets may be the name that one of them goes by.
    """
    return f"{pool}-{serve.get_replica_context().replica_id.unique_id}"
