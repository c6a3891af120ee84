"""What attention is like in a model: its heads, and which tokens each layer sees."""

from plan.model_config import ModelConfig


def head_dim(config: ModelConfig) -> int:
    """Width of one head of attention."""
    return int(
        config.get("head_dim")
        or config.number("hidden_size") // config.number("num_attention_heads")
    )


def num_kv_heads(config: ModelConfig) -> int:
    """Heads of keys and values."""
    num_heads = config.number("num_attention_heads")
    return int(config.get("num_key_value_heads", num_heads)) if _is_grouped(config) else num_heads


def _is_grouped(config: ModelConfig) -> bool:
    return config.family.has_kv_heads and not config.family.is_latent


def key_value_dims(config: ModelConfig) -> tuple[int, int]:
    """Width of a key and of a value in one head."""
    if config.family.is_latent:
        key_dim = config.number("qk_nope_head_dim") + config.number("qk_rope_head_dim")
        return key_dim, config.number("v_head_dim")
    return head_dim(config), head_dim(config)


def layer_windows(config: ModelConfig) -> tuple[int | None, ...]:
    """How many tokens each layer reads at most; None = all."""
    family, layers = config.family, config.number("num_hidden_layers")
    window = config.get("sliding_window") if config.has(family.window_flag) else None
    if not window:
        return (None,) * layers
    kinds = config.get("layer_types")
    if kinds:
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)
    every = int(config.get("sliding_window_pattern", family.full_attention_every))
    first = int(config.get("max_window_layers", 0)) if family.window_flag is not True else 0
    return tuple(
        None if layer < first or (every and (layer + 1) % every == 0) else window
        for layer in range(layers)
    )


def gathers_short_prompts(config: ModelConfig, num_tokens: int) -> bool:
    """Whether a prompt that is computed whole reads its own KV back from the blocks."""
    windows = [window for window in layer_windows(config) if window is not None]
    is_plain = not config.family.has_sinks and not config.get("attn_logit_softcapping")
    return not is_plain or min(windows, default=num_tokens) < num_tokens
