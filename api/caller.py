"""Who sent a request, as the door of either face found out."""

import hashlib
from dataclasses import dataclass

from router.request import EVERYBODY, Tenant


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """One client."""

    tenant: Tenant = EVERYBODY  # whose key it is; without keys all are one
    session_id: str = ""  # its x-session-id: where it would like to come back to

    def session_key(self, prompt_cache_key: str) -> str:
        """Name of the request's session; empty: none. Tenants never share one."""
        hint = prompt_cache_key or self.session_id
        if not hint:
            return ""
        text = f"{self.tenant.name}\0{hint}"
        return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()
