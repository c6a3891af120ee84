"""How a module was called, and what it answers to that again."""

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from engine.kv_cache import KVCache, KVCacheSpec
from engine.layer_attention import LayerAttention
from engine.native_attention import NativeAttention

POSITIONS = (3, 0, 77, 20, 41)  # of the tokens of a probe
_SMALL = 1e-3  # inputs of this size make an epsilon count
_BLOCK_SIZE = 4
_BLOCK_TABLE = ((1, 0, 0), (4, 3, 2))  # of two requests
_ROW_STARTS = (0, 2, len(POSITIONS))
_CONTEXT_LENS = (3, 10)


@dataclass(slots=True)
class RecordingAttention:
    """Stands in for a step's attention: gives random numbers, and notes what it was asked."""

    layer: LayerAttention | None = None  # the last one's
    asked: list[torch.Tensor] = field(default_factory=list)

    def attend(
        self, layer: LayerAttention, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """[num_tokens, num_heads, value_dim]; the same numbers in each layer."""
        self.layer = layer
        self.asked += [query, key, value]
        shape = (query.shape[1], query.shape[0], value.shape[2])
        generator = torch.Generator().manual_seed(0)
        return torch.randn(shape, generator=generator, dtype=query.dtype)


def small_step(spec: KVCacheSpec) -> NativeAttention:
    """A step of two requests, each in the middle of its prompt; the cache holds many numbers."""
    cache = KVCache(replace(spec, block_size=_BLOCK_SIZE), 1 + max(map(max, _BLOCK_TABLE)))
    numbers = torch.arange(cache.tensor.numel()) % 101 - 50
    cache.tensor.copy_(numbers.view_as(cache.tensor) / 50)
    return NativeAttention(
        kv_cache=cache,
        block_table=torch.tensor(_BLOCK_TABLE, dtype=torch.int32),
        row_starts=torch.tensor(_ROW_STARTS, dtype=torch.int32),
        context_lens=torch.tensor(_CONTEXT_LENS, dtype=torch.int32),
    )


@dataclass(frozen=True, slots=True)
class Call:
    """How a module was called."""

    arguments: tuple[Any, ...]
    keywords: dict[str, Any]

    def answers_of(self, module: nn.Module) -> tuple[list[torch.Tensor], LayerAttention | None]:
        """What the module gives, for small inputs too, and asks of attention."""
        attention = RecordingAttention()
        return self._answers(module, attention) + attention.asked, attention.layer

    def answers_over(self, module: nn.Module, spec: KVCacheSpec) -> list[torch.Tensor]:
        """What it gives where attention is a real step's, and what that leaves in the cache."""
        step = small_step(spec)
        return [*self._answers(module, step), step.kv_cache.tensor]

    def _answers(self, module: nn.Module, attention: Any) -> list[torch.Tensor]:
        keywords = dict(self.keywords)
        if "attention_metadata" in keywords:
            keywords["attention_metadata"] = attention
        answers = [_first(module(*self.arguments, **keywords))]
        if self.arguments:
            small = self.arguments[0] * _SMALL
            answers.append(_first(module(small, *self.arguments[1:], **keywords)))
        return answers


def _first(answer: Any) -> torch.Tensor:
    """A module's answer, or the first of several."""
    first = answer[0] if isinstance(answer, tuple) else answer
    assert isinstance(first, torch.Tensor)
    return first
