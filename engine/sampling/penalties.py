"""Repetition, presence and frequency penalties, with the meaning they have in transformers.

Repetition counts every token of prompt and output: a positive logit is divided by the penalty, a
negative one multiplied. Presence and frequency count the output only: the first is subtracted
once for each token that is there, the second as often as it is there.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from engine.sampling.entries import stack_entries
from engine.sampling.params import SamplingParams


class TokenCounts:
    """One request's distinct tokens and how often each is in the output, kept up step by step.

    Invariant: it tells of exactly the tokens it was shown.
    """

    def __init__(self, params: SamplingParams, prompt: Sequence[int]) -> None:
        self.params = params
        self._num_seen = len(prompt)
        self._place = {token_id: n for n, token_id in enumerate(dict.fromkeys(prompt))}
        capacity = 2 * len(self._place) + 64
        self._token_ids = np.zeros(capacity, dtype=np.int64)
        self._token_ids[: len(self._place)] = list(self._place)
        self._counts = np.zeros(capacity, dtype=np.float64)

    def update(self, token_ids: Sequence[int]) -> "TokenCounts":
        """Count what came since; `token_ids` is prompt and output so far."""
        for token_id in token_ids[self._num_seen :]:
            place = self._place.setdefault(token_id, len(self._place))
            if place == len(self._token_ids):
                self._token_ids = np.concatenate([self._token_ids, np.zeros_like(self._token_ids)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._token_ids[place] = token_id
            self._counts[place] += 1.0
        self._num_seen = len(token_ids)
        return self

    @property
    def token_ids(self) -> npt.NDArray[np.int64]:
        """Distinct tokens, [n]."""
        return self._token_ids[: len(self._place)]

    @property
    def deductions(self) -> npt.NDArray[np.float64]:
        """What presence and frequency take from each of them, [n]."""
        counts = self._counts[: len(self._place)]
        return self.params.frequency_penalty * counts + self.params.presence_penalty * (counts > 0)


def penalise(logits: torch.Tensor, counts: Mapping[int, TokenCounts]) -> None:
    """Row number -> its counts, in place."""
    index = stack_entries({n: each.token_ids for n, each in counts.items()}, logits.device)
    factors = np.concatenate(
        [np.full(len(c.token_ids), c.params.repetition_penalty) for c in counts.values()]
    )
    factor = torch.from_numpy(factors).to(logits)
    deduction = torch.from_numpy(np.concatenate([c.deductions for c in counts.values()])).to(logits)
    values = logits[index[0], index[1]]
    values = torch.where(values > 0, values / factor, values * factor) - deduction
    logits[index[0], index[1]] = values
