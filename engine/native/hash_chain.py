"""A prompt's chain of digests in one call.

It needs neither torch nor a server, so that routers have it too. Without it, and on CPUs that have
no instructions for SHA-256, `engine/block_hash.py` makes the same digests one by one.
"""

import ctypes
import sysconfig
from collections.abc import Callable
from functools import cache

from engine.native.plain_library import PlainLibrary

LIBRARY = PlainLibrary(
    name="hash_chain",
    instructions=("-msha", "-msse4.1"),
    cpu_flags=frozenset(("sha_ni", "ssse3", "sse4_1")),
    # what an int looks like inside depends on it
    python_abi=str(sysconfig.get_config_var("SOABI")),
)
DIGEST_BYTES = 32
PADDING_BYTES = 72  # at most, behind a block

# (parent, bytes of whole blocks, bytes of one) -> their digests, one behind the other
HashChain = Callable[[bytes, bytes, int], bytes]
TokenPacker = Callable[[list[int]], bytes]


@cache
def load_hash_chain() -> HashChain | None:
    """The function; None where it was not built or cannot run."""
    library = _load_library()
    if library is None:
        return None
    compiled = library.relevo_hash_chain
    compiled.restype = None
    text, size = ctypes.c_char_p, ctypes.c_size_t
    compiled.argtypes = (text, text, size, size, text, text)

    def hash_chain(parent: bytes, packed: bytes, block_bytes: int) -> bytes:
        assert len(parent) == DIGEST_BYTES
        num_blocks = len(packed) // block_bytes
        scratch = ctypes.create_string_buffer(DIGEST_BYTES + block_bytes + PADDING_BYTES)
        digests = ctypes.create_string_buffer(max(num_blocks * DIGEST_BYTES, 1))
        compiled(parent, packed, block_bytes, num_blocks, scratch, digests)
        return digests.raw[: num_blocks * DIGEST_BYTES]

    return hash_chain


@cache
def load_token_packer() -> TokenPacker | None:
    """Bytes of a list of token ids, for it alone; None where it was not built or cannot run."""
    library = _load_library()
    if library is None or not hasattr(library, "relevo_pack_tokens"):
        return None
    compiled: TokenPacker = library.relevo_pack_tokens
    compiled.restype, compiled.argtypes = ctypes.py_object, (ctypes.py_object,)  # type: ignore[attr-defined]
    return compiled


def _load_library() -> ctypes.PyDLL | None:
    path = LIBRARY.find()
    # It takes some 40 us: giving the interpreter away meanwhile could cost more to get it back.
    return ctypes.PyDLL(str(path)) if path else None
