"""Who sent a request, as the door of either face found out."""

import hashlib
from dataclasses import dataclass

from api.errors import ApiError, Verdict
from api.quotas import UNLIMITED, Allowance
from router.request import EVERYBODY, Tenant


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """One client."""

    tenant: Tenant = EVERYBODY  # whose key it is; without keys all are one
    session_id: str = ""  # its x-session-id: where it would like to come back to
    allowance: Allowance = UNLIMITED  # what its key may still use
    is_operator: bool = True  # sees the whole cluster and every tenant's requests

    def check_operator(self) -> None:
        """ApiError unless it may see the whole cluster."""
        if not self.is_operator:
            raise ApiError(
                Verdict.FORBIDDEN,
                "This speaks of all tenants: it needs the key of an operator"
                " (role=operator in the file of keys)",
            )

    @property
    def sees_tenant(self) -> str | None:
        """Whose requests it may look at; None: everybody's."""
        return None if self.is_operator else self.tenant.name

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
