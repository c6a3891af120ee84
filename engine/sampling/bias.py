"""Numbers a client adds to logits."""

from collections.abc import Mapping

import numpy as np
import torch

from engine.sampling.entries import stack_entries


class LogitBias:
    """One request's `logit_bias`, laid out once."""

    def __init__(self, biases: Mapping[int, float]) -> None:
        self.token_ids = np.fromiter(biases.keys(), dtype=np.int64, count=len(biases))
        self.values = np.fromiter(biases.values(), dtype=np.float64, count=len(biases))


def add_biases(logits: torch.Tensor, biases: Mapping[int, LogitBias]) -> None:
    """Row number -> what is added to it, in place."""
    index = stack_entries({n: bias.token_ids for n, bias in biases.items()}, logits.device)
    values = torch.from_numpy(np.concatenate([bias.values for bias in biases.values()]))
    logits[index[0], index[1]] += values.to(logits)
