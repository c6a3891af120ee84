"""Asks a loaded model, before the first request, whether paged attention can serve it.

Two tiny forwards in which attention gives zeros. They show what each layer wants of the KV cache,
and that attention is the only place where tokens meet: whatever else mixes them (a convolution, a
recurrent state, a count of rows) would mix requests too, for they all share one row.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from engine.kv_cache import KVCacheSpec

# Arguments of a layer's call that change nothing at inference or that `paged_attention` obeys.
_HARMLESS = frozenset(
    {"dropout", "position_ids", "sliding_window", "attention_mask", "softcap", "s_aux"}
)
_MIN_TOLERANCE = 1e-4  # parts of every model compute in float32


class AttentionProbe:
    """Stands in for the metadata of one forward, and notes what the layers ask for."""

    def __init__(self) -> None:
        self.layers: list[int] = []
        self.kv_heads: set[int] = set()
        self.head_dims: set[tuple[int, int]] = set()  # of keys and of values
        self.dtypes: set[torch.dtype] = set()
        self.windows: dict[int, int | None] = {}
        self.keys: list[torch.Tensor] = []  # each [num_kv_heads, num_tokens, head_dim]
        self.is_plain = True  # neither caps nor sinks
        self.extras: set[str] = set()  # what `paged_attention` cannot do

    def note(
        self,
        module: torch.nn.Module,
        key: torch.Tensor,
        value: torch.Tensor,
        arguments: Mapping[str, Any],
    ) -> None:
        """Remember one layer's call."""
        layer = module.layer_idx
        assert isinstance(layer, int)
        self.layers.append(layer)
        self.windows[layer] = arguments["sliding_window"]
        self.kv_heads |= {key.shape[1], value.shape[1]}
        self.head_dims.add((key.shape[3], value.shape[3]))
        self.dtypes |= {key.dtype, value.dtype}
        self.keys.append(key[0])
        self.is_plain &= arguments["softcap"] is None and arguments["s_aux"] is None
        # Flags tell what to return; tensors and numbers are part of the computation.
        self.extras |= {
            name
            for name, argument in arguments.items()
            if name not in _HARMLESS and argument is not None and not isinstance(argument, bool)
        }
        if arguments["attention_mask"] is not None:
            self.extras.add("a mask of its own making")
        if not getattr(module, "is_causal", True) or arguments.get("is_causal") is False:
            self.extras.add("attention to later tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTraits:
    """What a model was seen to want."""

    spec: KVCacheSpec
    windows: tuple[int | None, ...]  # those its layers have, each once
    is_plain: bool  # no layer caps its scores or has sinks


def probe_model(
    model: Any, *, max_model_len: int, block_size: int, wanted_windows: Mapping[int, bool]
) -> ModelTraits:
    """What this model wants of attention; ValueError with the reason if it cannot be served."""
    text_config = model.config.get_text_config()
    kind = text_config.model_type
    # One token at position 1, once behind and once before another: nothing about it may differ.
    # Not ids near 0: the embedding of padding is all zeros.
    own, left, right = (text_config.vocab_size // part for part in (2, 3, 4))
    first, behind = _forward(model, token_ids=[left, own], positions=[0, 1])
    _refuse(first, kind, int(text_config.num_hidden_layers), wanted_windows)
    second, before = _forward(model, token_ids=[own, right], positions=[1, max_model_len - 1])
    pairs = [(one[:, 1], two[:, 0]) for one, two in zip(first.keys, second.keys, strict=True)]
    if not all(_are_close(one, two) for one, two in [*pairs, (behind[1], before[0])]):
        raise ValueError(
            f"Got a {kind!r} model but expected one whose tokens meet in attention only: "
            f"a neighbour in the batch changes its result (state space, convolution or recurrence)"
        )
    (dtype,) = first.dtypes
    spec = KVCacheSpec(
        num_layers=len(first.layers),
        num_kv_heads=first.kv_heads.pop(),
        head_dim=max(max(dims) for dims in first.head_dims),
        block_size=block_size,
        dtype=str(dtype).removeprefix("torch."),
        device=str(model.device),
    )
    windows = tuple(dict.fromkeys(first.windows.values()))
    return ModelTraits(spec=spec, windows=windows, is_plain=first.is_plain)


def _forward(
    model: Any, *, token_ids: list[int], positions: list[int]
) -> tuple[AttentionProbe, torch.Tensor]:
    """What the layers asked for, and the logits, [2, vocab]."""
    probe = AttentionProbe()
    try:
        with torch.inference_mode():
            output = model(
                input_ids=torch.tensor([token_ids], device=model.device),
                position_ids=torch.tensor([positions], device=model.device),
                use_cache=False,
                logits_to_keep=torch.arange(2, device=model.device),
                attention_metadata=probe,
            )
    except (TypeError, AttributeError, KeyError, RuntimeError, IndexError) as error:
        raise ValueError(
            f"Got a {model.config.model_type!r} model but expected one whose attention can be "
            f"replaced: {str(error).strip().partition(chr(10))[0]}"
        ) from error
    return probe, output.logits[0]


def _refuse(
    probe: AttentionProbe, kind: str, num_layers: int, wanted_windows: Mapping[int, bool]
) -> None:
    if probe.extras:
        raise ValueError(f"Got a {kind!r} model with {sorted(probe.extras)}: not supported")
    if not probe.layers:
        raise ValueError(
            f"Got a {kind!r} model but expected one whose attention can be replaced: its layers "
            f"do not call transformers' attention interface (ALiBi, for one, has its own)"
        )
    if sorted(probe.layers) != list(range(num_layers)):
        raise ValueError(
            f"Got a {kind!r} model but expected {num_layers} layers of attention, each with a "
            f"cache of its own: attention ran in layers {sorted(probe.layers)}"
        )
    if any(len(each) != 1 for each in (probe.kv_heads, probe.head_dims, probe.dtypes)):
        raise ValueError(
            f"Got a {kind!r} model but expected keys and values of one shape in all layers: "
            f"KV heads {sorted(probe.kv_heads)}, widths {sorted(probe.head_dims)}"
        )
    has_window = {layer: window is not None for layer, window in probe.windows.items()}
    if wanted_windows and dict(wanted_windows) != has_window:
        raise ValueError(f"Got a {kind!r} model whose layers do not tell their sliding window")


def _are_close(one: torch.Tensor, two: torch.Tensor) -> bool:
    tolerance = max(4 * torch.finfo(one.dtype).eps, _MIN_TOLERANCE)
    return bool((one - two).abs().max() <= tolerance * one.abs().max().clamp(min=1e-6))
