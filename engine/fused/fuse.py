"""Replaces modules of a loaded model by fused ones, where these were seen to do the same.

1. One small forward, in which every module that might be fused notes how it is called.
2. Each of them gets that call again, and so does what it might be: only equal answers let it in.
   From the inside out: a layer is fused when all its modules are.
3. The same forward again: unless its logits are those of before, all is taken back.
4. Layers in a row become one call, if the logits are still those.
5. What stands around one such call becomes a `FusedModel`, if that has the same bits.

So no list of families is kept. What does something else, by however little, stays as it is.
"""

import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from engine.batch import Batch
from engine.fused.attention import attention_candidates
from engine.fused.gated_mlp import gated_mlp_candidates
from engine.fused.layer import layer_candidates, looks_like_layer
from engine.fused.model import FusedModel
from engine.fused.norm import norm_candidates
from engine.fused.probe import POSITIONS, Call, small_step
from engine.fused.stack import FusedStack, find_stacks
from engine.kv_cache import KVCacheSpec
from engine.layer_attention import LayerAttention

logger = logging.getLogger(__name__)

# Of the largest number. In float64 that leaves out norms that transformers rounds to float32.
_TOLERANCES = {torch.float32: 3e-5, torch.float64: 1e-12}
_NOT_CALLABLE = (AttributeError, RuntimeError, TypeError, ValueError)  # as the module is


@torch.inference_mode()
def fuse_modules(model: Any, spec: KVCacheSpec) -> int:
    """Replace what can be replaced, in place; how many modules that were."""
    calls: dict[str, Call] = {}
    before = _forward_noting(model, spec, calls)
    replaced: dict[str, nn.Module] = {}
    for name in sorted(calls, key=lambda each: -each.count(".")):
        module = model.get_submodule(name)
        if (fused := _find_equal(module, calls[name], spec)) is not None:
            replaced[name] = module
            model.set_submodule(name, fused)
    if replaced and not _says_the_same(model, spec, before):
        logger.warning("the fused modules of this model do not fit together: none is used")
        for name, module in reversed(replaced.items()):
            model.set_submodule(name, module)
        return 0
    _fuse_stacks(model, spec, before)
    return len(replaced)


@torch.inference_mode()
def fuse_model(model: Any, spec: KVCacheSpec) -> FusedModel | None:
    """All of a model whose modules were fused; None where it does something else besides."""
    try:
        fused = FusedModel(model)
        is_equal = torch.equal(fused.logits(_small_batch(model, spec)), _forward(model, spec))
    except _NOT_CALLABLE:
        return None
    return fused if is_equal else None


def _fuse_stacks(model: Any, spec: KVCacheSpec, before: torch.Tensor) -> None:
    """Let layers in a row be one, where the model gives all of them the same angles."""
    for name, layers in list(find_stacks(model)):
        model.set_submodule(name, nn.ModuleList([FusedStack(layers)]))
        if not _says_the_same(model, spec, before):
            model.set_submodule(name, nn.ModuleList(layers))


def _forward_noting(model: Any, spec: KVCacheSpec, calls: dict[str, Call]) -> torch.Tensor:
    """The logits of one small forward, [tokens, vocab]; `calls` gets who might be fused."""

    def noting(name: str) -> Any:
        def note(_: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            calls[name] = Call(arguments, keywords)

        return note

    layer = LayerAttention(0, 1.0)  # any: only the kind of module is looked at here
    hooks = [
        module.register_forward_pre_hook(noting(name), with_kwargs=True)
        for name, module in model.named_modules()
        if looks_like_layer(module) or next(_candidates(module, layer), None) is not None
    ]
    try:
        return _forward(model, spec)
    finally:
        for hook in hooks:
            hook.remove()


def _forward(model: Any, spec: KVCacheSpec) -> torch.Tensor:
    batch = _small_batch(model, spec)
    output = model(
        input_ids=batch.token_ids,
        position_ids=batch.position_ids,
        use_cache=False,
        logits_to_keep=batch.sample_index,
        attention_metadata=batch.attention,
    )
    logits = output.logits[0]
    assert isinstance(logits, torch.Tensor)
    return logits


def _small_batch(model: Any, spec: KVCacheSpec) -> Batch:
    """A step of which all logits are wanted."""
    vocab_size = model.config.get_text_config().vocab_size
    count = len(POSITIONS)
    # Not ids near 0: the embedding of padding is all zeros.
    token_ids = [vocab_size * (n + 1) // (count + 1) for n in range(count)]
    return Batch(
        token_ids=torch.tensor([token_ids]),
        position_ids=torch.tensor([POSITIONS]),
        sample_index=torch.arange(count),
        num_samples=count,
        attention=small_step(spec),
    )


def _says_the_same(model: Any, spec: KVCacheSpec, before: torch.Tensor) -> bool:
    try:
        after = _forward(model, spec)
    except _NOT_CALLABLE:
        return False
    return _deviation([before], [after]) <= _TOLERANCES[before.dtype]


def _candidates(module: nn.Module, layer: LayerAttention | None) -> Iterator[nn.Module]:
    yield from norm_candidates(module)
    yield from gated_mlp_candidates(module)
    yield from attention_candidates(module, layer)


def _find_equal(module: nn.Module, call: Call, spec: KVCacheSpec) -> nn.Module | None:
    """What does the same as a module."""
    if looks_like_layer(module):

        def ask(each: nn.Module) -> list[torch.Tensor]:
            return call.answers_over(each, spec)

        return _nearest(ask(module), layer_candidates(module), ask)
    expected, layer = call.answers_of(module)
    candidates = _candidates(module, layer)
    return _nearest(expected, candidates, lambda each: call.answers_of(each)[0])


def _nearest(
    expected: list[torch.Tensor],
    candidates: Iterator[nn.Module],
    ask: Callable[[nn.Module], list[torch.Tensor]],
) -> nn.Module | None:
    """The candidate whose answers are nearest, if they are near enough."""
    if not {answer.dtype for answer in expected} <= _TOLERANCES.keys():
        return None
    best, least = None, min(_TOLERANCES[answer.dtype] for answer in expected)
    for candidate in candidates:
        try:
            answers = ask(candidate)
        except _NOT_CALLABLE:
            continue
        if (deviation := _deviation(expected, answers)) <= least:
            best, least = candidate, deviation
    return best


def _deviation(expected: list[torch.Tensor], answers: list[torch.Tensor]) -> float:
    """The largest difference between two lists of tensors, in parts of each tensor's largest."""
    if [each.shape for each in expected] != [each.shape for each in answers]:
        return float("inf")
    parts = [
        (one - two).abs().max() / one.abs().max().clamp(min=1e-30)
        for one, two in zip(expected, answers, strict=True)
    ]
    # What is no number anywhere is as far off as can be.
    return float(torch.stack(parts).nan_to_num(nan=float("inf")).max())
