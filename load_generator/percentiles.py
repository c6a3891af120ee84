"""Percentiles of measured values, by nearest rank: each is a value that was seen."""

from collections.abc import Iterable

import numpy as np

SHOWN = (50.0, 90.0, 95.0, 99.0)


class Values:
    """Measured values of one kind; may be none at all."""

    def __init__(self, values: Iterable[float]) -> None:
        self.sorted = np.sort(np.fromiter(values, dtype=np.float64))

    def __len__(self) -> int:
        return len(self.sorted)

    def at(self, rank: float) -> float | None:
        """The percentile of this rank in [0, 100]."""
        if not len(self.sorted):
            return None
        return float(np.percentile(self.sorted, rank, method="inverted_cdf"))

    def to_dict(self) -> dict[str, float | int | None]:
        """Plain data, rounded to what a clock can tell."""
        shown = {f"p{rank:g}": self.at(rank) for rank in SHOWN}
        mean = float(self.sorted.mean()) if len(self.sorted) else None
        plain = {"mean": mean, **shown, "max": self.at(100.0)}
        rounded = {name: None if each is None else round(each, 3) for name, each in plain.items()}
        return {"count": len(self.sorted), **rounded}
