"""The ways a range of tokens may lie in two pools, for the benches of links."""

from dataclasses import dataclass

from kv_transfer.layout import KVLayout

PREFILL_BLOCK = 32


def make_layout(block_size: int) -> KVLayout:
    """23,040 bytes of bfloat16 KV per token, as of SmolLM2-135M."""
    return KVLayout(
        model_id="bench",
        model_revision="",
        dtype="bfloat16",
        num_layers=30,
        num_kv_heads=3,
        head_dim=64,
        block_size=block_size,
        hash_scheme="none",
    )


@dataclass(frozen=True, slots=True)
class LinkCase:
    """How a range lies; in a prefill pool its blocks have 32 tokens."""

    name: str
    decode_block: int = PREFILL_BLOCK
    is_scattered: bool = True
    # whether the bytes are those of whole blocks, as each chunk but the last of a prompt
    is_whole: bool = True

    def num_tokens(self, num_bytes: int) -> int:
        """Tokens of at least this many bytes."""
        unit = PREFILL_BLOCK if self.is_whole else 1
        return unit * -(-num_bytes // make_layout(unit).bytes_per_block)

    def num_bytes(self, num_bytes: int) -> int:
        """What these tokens have: a little more than was asked for."""
        return self.num_tokens(num_bytes) * make_layout(1).bytes_per_token


CASES = (
    LinkCase("consecutive", is_scattered=False),
    LinkCase("scattered"),
    LinkCase("part of a block", is_whole=False),
    LinkCase("unequal blocks", decode_block=16),
)
