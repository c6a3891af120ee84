"""Who may call: keys are kept as digests only, and every comparison takes the same time."""

import hashlib
import hmac
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from api.errors import ApiError, Verdict
from router.request import EVERYBODY, Tenant

_DIGEST = re.compile(r"[0-9a-f]{64}")
_SCHEME = "Bearer "
_NAME_DIGITS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """One key. Keys of one name are one tenant's."""

    digest: str
    tenant: Tenant


class ApiKeys:
    """Owns the digests of the keys. Without any, everybody may call."""

    def __init__(self, keys: Sequence[ApiKey]) -> None:
        self._keys = tuple((key.digest.encode(), key.tenant) for key in keys)

    @classmethod
    def load(cls, path: str) -> "ApiKeys":
        """Read a file with a key a line: `SHA-256 [name [weight]]`, in hex; no path: no keys."""
        if not path:
            return cls([])
        keys: list[ApiKey] = []
        for number, line in enumerate(Path(path).read_text().splitlines(), start=1):
            if words := line.partition("#")[0].split():
                keys.append(_read_key(words, f"line {number} of {path}"))
        if not keys:
            # An empty file must not open the door.
            raise ValueError(f"Got {path = } without any digest but expected at least one")
        return cls(keys)

    @property
    def are_required(self) -> bool:
        """Whether calls need a key at all."""
        return bool(self._keys)

    def check(self, authorizations: Sequence[str]) -> Tenant:
        """Return whose key a call brings in its authorization headers; ApiError if none is good."""
        if not self._keys:
            return EVERYBODY
        if len(authorizations) != 1 or not authorizations[0].startswith(_SCHEME):
            raise _refusal("Send one header `Authorization: Bearer KEY`")
        key = authorizations[0].removeprefix(_SCHEME)
        digest = hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest().encode()
        # No early exit: the time must not tell which digest came close.
        matches = [hmac.compare_digest(digest, known) for known, _ in self._keys]
        if not any(matches):
            raise _refusal("The API key is wrong")
        return self._keys[matches.index(True)][1]


def _read_key(words: Sequence[str], place: str) -> ApiKey:
    digest = words[0].lower()
    if not _DIGEST.fullmatch(digest):
        raise ValueError(f"Got {place} but expected 64 hex digits first")
    if len(words) > 3:
        raise ValueError(f"Got {len(words)} words in {place} but expected digest, name and weight")
    name = words[1] if len(words) > 1 else digest[:_NAME_DIGITS]
    weight = _read_weight(words[2], place) if len(words) > 2 else 1.0
    return ApiKey(digest=digest, tenant=Tenant(name=name, weight=weight))


def _read_weight(text: str, place: str) -> float:
    try:
        weight = float(text)
    except ValueError:
        weight = math.nan
    if not 0.0 < weight < math.inf:
        raise ValueError(f"Got weight {text!r} in {place} but expected a positive number")
    return weight


def _refusal(message: str) -> ApiError:
    return ApiError(Verdict.UNAUTHENTICATED, message)
