"""What the doors found out about a client, as the router uses it."""

from api.caller import Caller
from router.request import Tenant

ALICE = Caller(tenant=Tenant(name="alice"), session_id="chat")


def test_without_a_hint_there_is_no_session() -> None:
    assert Caller().session_key("") == ""


def test_a_body_speaks_louder_than_a_header() -> None:
    assert ALICE.session_key("") != ""
    assert ALICE.session_key("book") == Caller(tenant=ALICE.tenant).session_key("book")


def test_tenants_do_not_share_sessions() -> None:
    bob = Caller(tenant=Tenant(name="bob"), session_id="chat")
    assert ALICE.session_key("") != bob.session_key("")


def test_any_header_is_a_key() -> None:
    assert len(Caller(session_id="\udcff" * 5000).session_key("")) == 64
