"""What a model's configuration alone says against serving it, before any weight is read."""

from typing import Any

# Kinds of layers whose mask `paged_attention` can make.
_KNOWN_LAYERS = frozenset({"full_attention", "sliding_attention"})

# Parts of a model that read something else than text.
_TOWERS = ("vision", "audio", "speech", "image", "video")


def refuse_unservable(model_config: Any) -> None:
    """ValueError with the reason, in one line."""
    kind = model_config.model_type
    if getattr(model_config, "is_encoder_decoder", False):
        raise ValueError(f"Got a {kind!r} model but expected a decoder: it has an encoder")
    parts = sorted(getattr(model_config, "sub_configs", {}))
    if towers := [part for part in parts if part.startswith(_TOWERS)]:
        raise ValueError(f"Got a {kind!r} model but expected one of text alone: it has {towers}")
    text_config = model_config.get_text_config()
    layer_types = set(getattr(text_config, "layer_types", None) or ())
    if unknown := layer_types - _KNOWN_LAYERS:
        raise ValueError(
            f"Got a {kind!r} model with {sorted(unknown)} layers but expected full or sliding "
            f"attention only"
        )
    if getattr(text_config, "num_kv_shared_layers", 0):
        raise ValueError(
            f"Got a {kind!r} model but expected layers that share no KV: "
            f"{text_config.num_kv_shared_layers} read another layer's"
        )


def wanted_windows(text_config: Any, max_model_len: int) -> dict[int, bool]:
    """Which layers must see a window, by the config; empty when it does not say."""
    window = getattr(text_config, "sliding_window", None)
    if window is not None and window >= max_model_len:
        return {}  # never reached
    layer_types = getattr(text_config, "layer_types", None)
    if layer_types:
        return {n: kind == "sliding_attention" for n, kind in enumerate(layer_types)}
    if window:
        return dict.fromkeys(range(int(text_config.num_hidden_layers)), True)
    return {}
