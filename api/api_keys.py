"""Who may call: keys are kept as digests only, and every comparison takes the same time."""

import hashlib
import hmac
import re
from collections.abc import Sequence
from pathlib import Path

from api.errors import ApiError, Verdict

_DIGEST = re.compile(r"[0-9a-f]{64}")
_SCHEME = "Bearer "


class ApiKeys:
    """Owns the digests of the keys. Without any, everybody may call."""

    def __init__(self, digests: Sequence[str]) -> None:
        self._digests = tuple(digest.encode() for digest in digests)

    @classmethod
    def load(cls, path: str) -> "ApiKeys":
        """Read a file of hex SHA-256 digests, one a line; no path: no keys."""
        if not path:
            return cls([])
        digests: list[str] = []
        for number, line in enumerate(Path(path).read_text().splitlines(), start=1):
            text = line.partition("#")[0].strip().lower()
            if text and not _DIGEST.fullmatch(text):
                raise ValueError(f"Got line {number} of {path} but expected 64 hex digits")
            if text:
                digests.append(text)
        if not digests:
            # An empty file must not open the door.
            raise ValueError(f"Got {path = } without any digest but expected at least one")
        return cls(digests)

    @property
    def are_required(self) -> bool:
        """Whether calls need a key at all."""
        return bool(self._digests)

    def check(self, authorizations: Sequence[str]) -> None:
        """Judge a call's authorization headers; ApiError unless there is one, with a good key."""
        if not self._digests:
            return
        if len(authorizations) != 1 or not authorizations[0].startswith(_SCHEME):
            raise _refusal("Send one header `Authorization: Bearer KEY`")
        key = authorizations[0].removeprefix(_SCHEME)
        digest = hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest().encode()
        # No early exit: the time must not tell which digest came close.
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        if not any(matches):
            raise _refusal("The API key is wrong")


def _refusal(message: str) -> ApiError:
    return ApiError(Verdict.UNAUTHENTICATED, message)
