"""Who sent a request, as the door of either face found out."""

import hashlib
from dataclasses import dataclass

from api.quotas import UNLIMITED, Allowance
from router.request import EVERYBODY, Tenant


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """One client."""

    tenant: Tenant = EVERYBODY  # whose key it is; without keys all are one
    session_id: str = ""  # its x-session-id: where it would like to come back to
    allowance: Allowance = UNLIMITED  # what its key may still use

    def session_key(self, prompt_cache_key: str) -> str:
        """Name of the request's session; empty: none. Tenants never share one."""
        hint = prompt_cache_key or self.session_id
        return self._own(hint) if hint else ""

    def cache_salt(self, salt: str) -> str:
        """Salt under which no other tenant's blocks can be found."""
        return self._own(salt)

    def _own(self, text: str) -> str:
        text = f"{self.tenant.name}\0{text}"
        return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()
