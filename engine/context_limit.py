"""How many tokens one request may have, by the model's configuration."""

from collections.abc import Mapping
from typing import Any

from engine.config import EngineConfig

# RoPE whose frequencies depend on the longest position in the call: a neighbour would change
# a request. Up to the original length they are constant.
_NEIGHBOUR_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})


def choose_max_model_len(config: EngineConfig, text_config: Any) -> int:
    """What was asked for, or all that the model can; ValueError when it was asked for more."""
    limit = int(getattr(text_config, "max_position_embeddings", None) or 1 << 20)
    reason = "max_position_embeddings"
    for part in _rope_parts(text_config):
        if part.get("rope_type") in _NEIGHBOUR_DEPENDENT_ROPE:
            original = part.get("original_max_position_embeddings") or getattr(
                text_config, "original_max_position_embeddings", None
            )
            limit = min(limit, int(original or limit))
            reason = f"original length of its {part['rope_type']} RoPE"
    if config.max_model_len is not None and config.max_model_len > limit:
        raise ValueError(
            f"Got {config.max_model_len = } but expected at most {limit}: the {reason}"
        )
    return config.max_model_len or limit


def _rope_parts(text_config: Any) -> list[Mapping[str, Any]]:
    """RoPE parameters; some models have one set per type of layer."""
    parameters = getattr(text_config, "rope_parameters", None) or {}
    if "rope_type" in parameters:
        return [parameters]
    return [part for part in parameters.values() if isinstance(part, Mapping)]
