"""Who may call: keys are kept as digests only, and every comparison takes the same time.

The file is looked at again at most once a second, when somebody calls: a key that is added opens
from then on, one that is taken out does not. A file that cannot be used leaves the keys alone.
"""

import hashlib
import hmac
import logging
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from api.caller import Caller
from api.errors import ApiError, Verdict
from api.quotas import Allowance, Quota
from router.request import Tenant

RELOAD_PERIOD_S = 1.0
_DIGEST = re.compile(r"[0-9a-f]{64}")
_SCHEME = "Bearer "
_NAME_DIGITS = 12
_ROLES = ("operator", "client")

_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """One key. Keys of one name are one tenant's; quotas are the key's own."""

    digest: str
    tenant: Tenant
    quota: Quota
    is_named: bool = True  # whether its line names the tenant
    role: str = ""  # operator or client; empty: see `_default_role`


@dataclass(frozen=True, slots=True)
class _Holder:
    """A key and what it has left."""

    digest: bytes
    tenant: Tenant
    allowance: Allowance
    is_operator: bool


class ApiKeys:
    """Owns the digests of the keys. Without a file everybody may call.

    Invariant: once there were keys there always are some: no change of the file opens the door.
    """

    def __init__(self, path: str = "", *, now: Callable[[], float] = time.monotonic) -> None:
        """OSError or ValueError when there is a path and no good file."""
        self._path = Path(path).expanduser() if path else None
        self._now = now
        self._holders: tuple[_Holder, ...] = ()
        self._looked_at_s = now()
        self._version: tuple[int, ...] = ()
        if self._path is not None:
            self._version = _version(self._path)
            self._take(read_keys(self._path))

    @property
    def are_required(self) -> bool:
        """Whether calls need a key at all."""
        return self._path is not None

    def admit(self, authorizations: Sequence[str], *, session_id: str = "") -> Caller:
        """Say who calls, by the authorization headers; ApiError: no good key, or a spent quota."""
        if self._path is None:
            return Caller(session_id=session_id)
        self._reload_if_due(self._path)
        holder = self._find(authorizations)
        holder.allowance.admit()
        return Caller(
            tenant=holder.tenant,
            session_id=session_id,
            allowance=holder.allowance,
            is_operator=holder.is_operator,
        )

    def _find(self, authorizations: Sequence[str]) -> _Holder:
        if len(authorizations) != 1 or not authorizations[0].startswith(_SCHEME):
            raise _refusal("Send one header `Authorization: Bearer KEY`")
        key = authorizations[0].removeprefix(_SCHEME)
        digest = hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest().encode()
        # No early exit: the time must not tell which digest came close.
        matches = [hmac.compare_digest(digest, holder.digest) for holder in self._holders]
        if not any(matches):
            raise _refusal("The API key is wrong")
        return self._holders[matches.index(True)]

    def _reload_if_due(self, path: Path) -> None:
        if self._now() - self._looked_at_s < RELOAD_PERIOD_S:
            return
        self._looked_at_s = self._now()
        try:
            version = _version(path)
            if version == self._version:
                return
            self._version = version
            self._take(read_keys(path))
        except (OSError, ValueError) as error:
            _LOGGER.error("The API keys stay as they were: %s", error)
        else:
            _LOGGER.info("Read %d API keys", len(self._holders))

    def _take(self, keys: Sequence[ApiKey]) -> None:
        """Use these from now on; who keeps its key and quota keeps what it has used."""
        before = {each.digest: each.allowance for each in self._holders}
        holders = []
        default_role = _default_role(keys)
        for key in keys:
            digest = key.digest.encode()
            allowance = before.get(digest)
            if allowance is None or allowance.quota != key.quota:
                allowance = Allowance(key.quota, now=self._now)
            is_operator = (key.role or default_role) == "operator"
            holders.append(_Holder(digest, key.tenant, allowance, is_operator))
        self._holders = tuple(holders)


def read_keys(path: Path) -> list[ApiKey]:
    """Read a file with a key a line: `SHA-256 [name [weight]] [quota=number]… [role=…]`, in hex."""
    keys: list[ApiKey] = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        if words := line.partition("#")[0].split():
            keys.append(_read_key(words, f"line {number} of {path}"))
    if not keys:
        # An empty file must not open the door.
        raise ValueError(f"Got {str(path)!r} without any digest but expected at least one")
    return keys


def _read_key(words: Sequence[str], place: str) -> ApiKey:
    digest = words[0].lower()
    if not _DIGEST.fullmatch(digest):
        raise ValueError(f"Got {place} but expected 64 hex digits first")
    plain = [word for word in words[1:] if "=" not in word]
    if len(plain) > 2:
        raise ValueError(f"Got {len(words)} words in {place} but expected digest, name and weight")
    name = plain[0] if plain else digest[:_NAME_DIGITS]
    weight = _read_positive(plain[1], "weight", place) if len(plain) > 1 else 1.0
    settings = dict(word.split("=", 1) for word in words[1:] if "=" in word)
    role = settings.pop("role", None)
    if role is not None and role not in _ROLES:
        raise ValueError(f"Got role {role!r} in {place} but expected {' or '.join(_ROLES)}")
    if unknown := settings.keys() - Quota.__dataclass_fields__.keys():
        known = ", ".join([*Quota.__dataclass_fields__, "role"])
        raise ValueError(f"Got {min(unknown)!r} in {place} but expected {known}")
    limits = {key: _read_positive(text, key, place) for key, text in settings.items()}
    return ApiKey(
        digest=digest,
        tenant=Tenant(name=name, weight=weight),
        quota=Quota(**limits),
        is_named=bool(plain),
        role=role or "",
    )


def _default_role(keys: Sequence[ApiKey]) -> str:
    """What a key without a role is: where nobody is told apart, the owner's own."""
    names = {key.tenant.name if key.is_named else "" for key in keys}
    is_one_owner = len(names) == 1 and not any(key.role for key in keys)
    return "operator" if is_one_owner else "client"


def _read_positive(text: str, name: str, place: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0.0 < number < float("inf"):
        raise ValueError(f"Got {name} {text!r} in {place} but expected a positive number")
    return number


def _version(path: Path) -> tuple[int, ...]:
    """What changes whenever the file does, also when another one is moved into its place."""
    status = path.stat()
    return status.st_mtime_ns, status.st_size, status.st_ino


def _refusal(message: str) -> ApiError:
    return ApiError(Verdict.UNAUTHENTICATED, message)
