"""How long prompts and answers are: a number, a range, or the long tail of real traffic."""

import math
import random
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Lengths(BaseModel):
    """Tokens, drawn between `low` and `high`: evenly, or log-normally around a median.

    In a file `128` is that number each time, `{low: 64, high: 256}` any of a range and
    `{median: 300, spread: 0.8, high: 2000}` mostly short ones with a few long.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    low: int = Field(default=1, ge=1)
    high: int = Field(ge=1)
    median: float | None = Field(default=None, gt=0)  # null = evenly
    spread: float = Field(default=0.8, ge=0, le=5)  # sigma of the logarithm

    @model_validator(mode="before")
    @classmethod
    def _read_number(cls, value: Any) -> Any:
        is_number = isinstance(value, int) and not isinstance(value, bool)
        return {"low": value, "high": value} if is_number else value

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        if self.low > self.high:
            raise ValueError(f"low = {self.low} is above high = {self.high}")
        return self

    def draw(self, rng: random.Random) -> int:
        """One length."""
        if self.median is None:
            return rng.randint(self.low, self.high)
        drawn = round(rng.lognormvariate(math.log(self.median), self.spread))
        return min(max(drawn, self.low), self.high)
