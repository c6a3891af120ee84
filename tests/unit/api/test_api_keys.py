"""The keys file, the judgement of headers, what changes while we run."""

import hashlib
import os
from pathlib import Path

import pytest

from api.api_keys import RELOAD_PERIOD_S, ApiKeys, read_keys
from api.caller import Caller
from api.errors import ApiError
from api.quotas import Quota
from router.request import EVERYBODY, Tenant
from tests.fakes import FakeClock


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def keys_in(tmp_path: Path, text: str, *, clock: FakeClock | None = None) -> ApiKeys:
    path = tmp_path / "keys"
    path.write_text(text)
    return ApiKeys(str(path), now=clock or FakeClock())


def status_of(keys: ApiKeys, *authorizations: str) -> int:
    try:
        keys.admit(authorizations)
    except ApiError as error:
        return error.face.http_status
    return 200


def test_no_file_means_no_keys() -> None:
    keys = ApiKeys("")
    assert not keys.are_required
    assert keys.admit([], session_id="s") == Caller(tenant=EVERYBODY, session_id="s")


def test_any_of_several_keys_opens(tmp_path: Path) -> None:
    text = f"{digest('one')}\n\n# comment\n{digest('two').upper()}  # theirs\n"
    keys = keys_in(tmp_path, text)
    assert keys.are_required
    assert status_of(keys, "Bearer one") == status_of(keys, "Bearer two") == 200
    for bad in ([], ["Bearer three"], ["Bearer "], ["two"], ["Bearer one", "Bearer two"]):
        assert status_of(keys, *bad) == 401


@pytest.mark.parametrize("text", ["", "# nothing\n", "sk-plain-key\n", "abc\n"])
def test_a_file_without_good_digests_does_not_open_the_door(tmp_path: Path, text: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        keys_in(tmp_path, text)


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="keys"):
        ApiKeys(str(tmp_path / "keys"))


def test_odd_keys_are_wrong_and_harmless(tmp_path: Path) -> None:
    keys = keys_in(tmp_path, digest("one"))
    for key in ("\udcff", "ž", "x" * 100_000):
        assert status_of(keys, f"Bearer {key}") == 401


def test_a_key_says_whose_it_is(tmp_path: Path) -> None:
    keys = keys_in(
        tmp_path,
        f"{digest('one')} alice 2.5\n{digest('two')} alice # her other\n{digest('three')}\n",
    )
    tenants = [keys.admit([f"Bearer {key}"]).tenant for key in ("one", "two", "three")]
    assert tenants == [
        Tenant(name="alice", weight=2.5),
        Tenant(name="alice"),
        Tenant(name=digest("three")[:12]),
    ]


def test_quotas_stand_anywhere_behind_the_digest(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(
        f"{digest('one')} requests_per_minute=5 bob 2\n{digest('two')} bob tokens_per_minute=1e3\n"
    )
    one, two = read_keys(path)
    assert (one.tenant, one.quota) == (Tenant(name="bob", weight=2), Quota(requests_per_minute=5))
    assert two.quota == Quota(tokens_per_minute=1000)


@pytest.mark.parametrize(
    ("rests", "operators"),
    [
        (["", ""], "12"),  # nobody is told apart: all are the owner's
        (["alice", "alice 2"], "12"),
        (["alice", "bob"], ""),
        (["alice", ""], ""),
        (["alice role=operator", "bob"], "1"),
        (["role=operator", ""], "1"),
        (["alice role=client", "alice"], ""),
        (["role=client"], ""),
        (["alice role=operator", "bob requests_per_minute=5 role=operator"], "12"),
    ],
)
def test_who_sees_everything(tmp_path: Path, rests: list[str], operators: str) -> None:
    lines = [f"{digest(str(number))} {rest}\n" for number, rest in enumerate(rests, start=1)]
    keys = keys_in(tmp_path, "".join(lines))
    callers = {str(n): keys.admit([f"Bearer {n}"]) for n in range(1, len(rests) + 1)}
    assert "".join(name for name, caller in callers.items() if caller.is_operator) == operators
    for caller in callers.values():
        assert caller.sees_tenant == (None if caller.is_operator else caller.tenant.name)


def test_a_second_tenant_in_the_file_takes_the_first_one_s_sight(tmp_path: Path) -> None:
    clock = FakeClock()
    keys = keys_in(tmp_path, f"{digest('one')} alice\n", clock=clock)
    assert keys.admit(["Bearer one"]).is_operator
    (tmp_path / "keys").write_text(f"{digest('one')} alice\n{digest('two')} bob\n")
    clock.advance(RELOAD_PERIOD_S)
    assert not keys.admit(["Bearer one"]).is_operator


@pytest.mark.parametrize(
    "rest",
    [
        *("a role=king", "a role=", "a Role=operator"),
        *("alice 0", "alice -1", "alice much", "alice inf", "a 1 2"),
        *("a tokens_per_minute=0", "a tokens=5", "a requests_per_minute=x", "a =5"),
    ],
)
def test_a_bad_word_names_its_line(tmp_path: Path, rest: str) -> None:
    with pytest.raises(ValueError, match="line 1"):
        keys_in(tmp_path, f"{digest('one')} {rest}\n")


def test_a_changed_file_counts_from_the_next_second_on(tmp_path: Path) -> None:
    clock = FakeClock()
    keys = keys_in(tmp_path, digest("old"), clock=clock)
    (tmp_path / "keys").write_text(f"{digest('new')}\n{digest('other')}")
    assert status_of(keys, "Bearer new") == 401
    clock.advance(RELOAD_PERIOD_S)
    assert status_of(keys, "Bearer new") == 200
    assert status_of(keys, "Bearer old") == 401


@pytest.mark.parametrize("text", [None, "", "nonsense"])
def test_a_file_that_cannot_be_used_leaves_the_keys(tmp_path: Path, text: str | None) -> None:
    clock, path = FakeClock(), tmp_path / "keys"
    keys = keys_in(tmp_path, digest("one"), clock=clock)
    if text is None:
        path.unlink()
    else:
        path.write_text(text)
    clock.advance(RELOAD_PERIOD_S)
    assert status_of(keys, "Bearer one") == 200
    assert status_of(keys) == 401
    path.write_text(digest("two"))
    clock.advance(RELOAD_PERIOD_S)
    assert status_of(keys, "Bearer one") == 401
    assert status_of(keys, "Bearer two") == 200


def test_a_reload_forgives_nothing(tmp_path: Path) -> None:
    clock, path = FakeClock(), tmp_path / "keys"
    line = f"{digest('one')} a requests_per_minute=1\n"
    keys = keys_in(tmp_path, line, clock=clock)
    assert status_of(keys, "Bearer one") == 200
    other = tmp_path / "other"
    other.write_text(line + digest("two"))
    os.replace(other, path)
    clock.advance(RELOAD_PERIOD_S)
    assert status_of(keys, "Bearer two") == 200
    assert status_of(keys, "Bearer one") == 429
