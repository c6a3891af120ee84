"""A whole model whose layers are one call: nothing of it looks at what cannot be there."""

from typing import Any

import torch
from torch import nn

from engine.batch import Batch
from engine.fused.stack import FusedStack


class FusedModel:
    """What a transformers causal model does with a step, apart from what it never asks for here:
    caches, masks, hidden states of every layer, dictionaries of outputs."""

    def __init__(self, model: Any) -> None:
        """AttributeError, TypeError or ValueError when the model has other parts than these."""
        body = model.get_decoder()
        (self._stack,) = body.layers
        if not isinstance(self._stack, FusedStack):
            raise TypeError(f"Got layers of {type(self._stack)} but expected one stack")
        self._embed: nn.Module = body.embed_tokens
        self._angles: nn.Module = body.rotary_emb
        self._norm: nn.Module = body.norm
        self._head: nn.Module = model.get_output_embeddings()

    def logits(self, batch: Batch) -> torch.Tensor:
        """Of the tokens of `batch.sample_index`, [len, vocab]."""
        hidden = self._embed(batch.token_ids)
        hidden = self._stack(
            hidden,
            position_embeddings=self._angles(hidden, batch.position_ids),
            attention_metadata=batch.attention,
        )
        if not batch.samples_each:
            hidden = hidden[:, batch.sample_index]
        logits: torch.Tensor = self._head(self._norm(hidden))
        return logits[0]
