"""What peers must know of an engine's own pool."""

from engine.block_hash import HASH_SCHEME
from engine.engine import Engine
from kv_transfer.layout import KVLayout
from kv_transfer.shared_memory_channel import SharedPool


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


def shared_pool_of(engine: Engine) -> SharedPool | None:
    """Return what peers on this host may map, if that is how the pool was made."""
    memory = engine.kv_cache.shared_memory
    return SharedPool(memory.descriptor, memory.num_bytes) if memory is not None else None
