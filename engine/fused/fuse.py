"""Replaces modules of a loaded model by fused ones, where these were seen to do the same.

1. One small forward, in which every module that might be fused notes how it is called.
2. Each of them gets that call again, and so does what it might be: only equal answers let it in.
3. The same forward again: unless its logits are those of before, all is taken back.

So no list of families is kept. What does something else, by however little, stays as it is.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from engine.fused.attention import attention_candidates
from engine.fused.gated_mlp import gated_mlp_candidates
from engine.fused.norm import norm_candidates
from engine.layer_attention import LayerAttention

logger = logging.getLogger(__name__)

# Of the largest number. In float64 that leaves out norms that transformers rounds to float32.
_TOLERANCES = {torch.float32: 3e-5, torch.float64: 1e-12}
_POSITIONS = (3, 0, 77, 20, 41)
_SMALL = 1e-3  # inputs of this size make an epsilon count


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


@dataclass(frozen=True, slots=True)
class _Call:
    """How a module was called."""

    arguments: tuple[Any, ...]
    keywords: dict[str, Any]

    def answers_of(self, module: nn.Module) -> tuple[list[torch.Tensor], LayerAttention | None]:
        """What the module gives, for small inputs too, and asks of attention."""
        attention = RecordingAttention()
        keywords = dict(self.keywords)
        if "attention_metadata" in keywords:
            keywords["attention_metadata"] = attention
        answers = [_first(module(*self.arguments, **keywords))]
        if self.arguments:
            small = self.arguments[0] * _SMALL
            answers.append(_first(module(small, *self.arguments[1:], **keywords)))
        return answers + attention.asked, attention.layer


@torch.inference_mode()
def fuse_modules(model: Any) -> int:
    """Replace what can be replaced, in place; how many modules that were."""
    calls: dict[str, _Call] = {}
    before = _forward_noting(model, calls)
    replaced: dict[str, nn.Module] = {}
    # From the inside out: norms within an attention block are fused before the block is.
    for name in sorted(calls, key=lambda each: -each.count(".")):
        module = model.get_submodule(name)
        if (fused := _find_equal(module, calls[name])) is not None:
            replaced[name] = module
            model.set_submodule(name, fused)
    if replaced and _deviation([before], [_forward(model)]) > _TOLERANCES[before.dtype]:
        logger.warning("the fused modules of this model do not fit together: none is used")
        for name, module in reversed(replaced.items()):
            model.set_submodule(name, module)
        return 0
    return len(replaced)


def _forward_noting(model: Any, calls: dict[str, _Call]) -> torch.Tensor:
    """The logits of one small forward, [tokens, vocab]; `calls` gets who might be fused."""

    def noting(name: str) -> Any:
        def note(_: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            calls[name] = _Call(arguments, keywords)

        return note

    layer = LayerAttention(0, 1.0)  # any: only the kind of module is looked at here
    hooks = [
        module.register_forward_pre_hook(noting(name), with_kwargs=True)
        for name, module in model.named_modules()
        if next(_candidates(module, layer), None) is not None
    ]
    try:
        return _forward(model)
    finally:
        for hook in hooks:
            hook.remove()


def _forward(model: Any) -> torch.Tensor:
    vocab_size = model.config.get_text_config().vocab_size
    count = len(_POSITIONS)
    # Not ids near 0: the embedding of padding is all zeros.
    token_ids = [vocab_size * (n + 1) // (count + 1) for n in range(count)]
    output = model(
        input_ids=torch.tensor([token_ids]),
        position_ids=torch.tensor([_POSITIONS]),
        use_cache=False,
        logits_to_keep=torch.arange(count),
        attention_metadata=RecordingAttention(),
    )
    logits = output.logits[0]
    assert isinstance(logits, torch.Tensor)
    return logits


def _candidates(module: nn.Module, layer: LayerAttention | None) -> Iterator[nn.Module]:
    yield from norm_candidates(module)
    yield from gated_mlp_candidates(module)
    yield from attention_candidates(module, layer)


def _find_equal(module: nn.Module, call: _Call) -> nn.Module | None:
    """The candidate whose answers are nearest, if they are near enough."""
    expected, layer = call.answers_of(module)
    if not {answer.dtype for answer in expected} <= _TOLERANCES.keys():
        return None
    best, least = None, min(_TOLERANCES[answer.dtype] for answer in expected)
    for candidate in _candidates(module, layer):
        try:
            answers, _ = call.answers_of(candidate)
        except (AttributeError, RuntimeError, TypeError, ValueError):
            continue  # it cannot even be called as the module is
        if (deviation := _deviation(expected, answers)) <= least:
            best, least = candidate, deviation
    return best


def _deviation(expected: list[torch.Tensor], answers: list[torch.Tensor]) -> float:
    """The largest difference between two lists of tensors, in parts of each tensor's largest."""
    if [each.shape for each in expected] != [each.shape for each in answers]:
        return float("inf")
    parts = [
        float((one - two).abs().max() / one.abs().max().clamp(min=1e-30))
        for one, two in zip(expected, answers, strict=True)
    ]
    return max(parts)


def _first(answer: Any) -> torch.Tensor:
    """A module's answer, or the first of several."""
    first = answer[0] if isinstance(answer, tuple) else answer
    assert isinstance(first, torch.Tensor)
    return first
