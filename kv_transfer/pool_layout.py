"""The layout of an engine's own pool."""

from engine.block_hash import HASH_SCHEME
from engine.engine import Engine
from kv_transfer.layout import KVLayout


def layout_of(engine: Engine) -> KVLayout:
    """Return what peers must agree with."""
    config, spec = engine.config, engine.spec
    return KVLayout(
        model_id=config.model_id or config.model_path,
        model_revision=config.model_revision,
        dtype=spec.dtype,
        num_layers=spec.num_layers,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        block_size=spec.block_size,
        hash_scheme=HASH_SCHEME,
    )
