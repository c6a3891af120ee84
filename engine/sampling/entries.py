"""Single logits of several rows as one index, so that a stage costs the same for any batch."""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch


def stack_entries(
    token_ids: Mapping[int, npt.NDArray[np.int64]], device: torch.device
) -> torch.Tensor:
    """Row number -> ids [n] of one row; returns [2, sum of n]: rows, ids."""
    rows = np.repeat(
        np.fromiter(token_ids, dtype=np.int64, count=len(token_ids)),
        [len(ids) for ids in token_ids.values()],
    )
    return torch.from_numpy(np.stack([rows, np.concatenate(list(token_ids.values()))])).to(device)
