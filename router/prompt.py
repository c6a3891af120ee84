"""The tokens of one attempt and the names under which workers may hold their blocks."""

from collections.abc import Sequence

from engine.block_hash import joined_hashes, pack_tokens, salted_root
from router.block_name import BlockName, BlockScheme, names_of_joined


class Prompt:
    """Hashes on demand, once for each way the workers cut and name their blocks."""

    def __init__(
        self,
        token_ids: Sequence[int],
        *,
        cache_salt: str,
        num_output_tokens: int,
        num_choices: int = 1,
        session_key: str = "",
        skips_cache: bool = False,
    ) -> None:
        self.token_ids = token_ids
        self.num_output_tokens = num_output_tokens  # expected still to come
        self.num_choices = num_choices  # that will be decoded together
        self.session_key = session_key
        self.skips_cache = skips_cache  # every token of it must be computed, cached or not
        self._cache_salt = cache_salt
        self._names: dict[BlockScheme, list[BlockName]] = {}

    def __len__(self) -> int:
        return len(self.token_ids)

    def block_names(self, scheme: BlockScheme) -> list[BlockName]:
        """Names of its full blocks, in order."""
        if scheme not in self._names:
            root = salted_root(scheme.hash_root, self._cache_salt)
            packed = pack_tokens(self.token_ids)
            hashes = joined_hashes(packed, block_size=scheme.block_size, parent=root)
            self._names[scheme] = names_of_joined(hashes)
        return self._names[scheme]
