"""The keys file and the judgement of headers."""

import hashlib
from pathlib import Path

import pytest

from api.api_keys import ApiKey, ApiKeys
from api.errors import ApiError
from router.request import EVERYBODY, Tenant


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def test_no_file_means_no_keys() -> None:
    keys = ApiKeys.load("")
    assert not keys.are_required
    keys.check([])


def test_any_of_several_keys_opens(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(f"{digest('one')}\n\n# comment\n{digest('two').upper()}  # theirs\n")
    keys = ApiKeys.load(str(path))
    keys.check(["Bearer one"])
    keys.check(["Bearer two"])
    for bad in ([], ["Bearer three"], ["Bearer "], ["two"], ["Bearer one", "Bearer two"]):
        with pytest.raises(ApiError) as caught:
            keys.check(bad)
        assert caught.value.face.http_status == 401


@pytest.mark.parametrize("text", ["", "# nothing\n", "sk-plain-key\n", "abc\n"])
def test_a_file_without_good_digests_does_not_open_the_door(tmp_path: Path, text: str) -> None:
    path = tmp_path / "keys"
    path.write_text(text)
    with pytest.raises(ValueError, match="expected"):
        ApiKeys.load(str(path))


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="keys"):
        ApiKeys.load(str(tmp_path / "keys"))


def test_odd_keys_are_wrong_and_harmless() -> None:
    keys = ApiKeys([ApiKey(digest=digest("one"), tenant=Tenant(name="one"))])
    for key in ("\udcff", "ž", "x" * 100_000):
        with pytest.raises(ApiError):
            keys.check([f"Bearer {key}"])


def test_a_key_says_whose_it_is(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(
        f"{digest('one')} alice 2.5\n{digest('two')} alice # her other\n{digest('three')}\n"
    )
    keys = ApiKeys.load(str(path))
    assert keys.check(["Bearer one"]) == Tenant(name="alice", weight=2.5)
    assert keys.check(["Bearer two"]) == Tenant(name="alice")
    assert keys.check(["Bearer three"]) == Tenant(name=digest("three")[:12])
    assert ApiKeys.load("").check([]) == EVERYBODY


@pytest.mark.parametrize("rest", ["alice 0", "alice -1", "alice much", "alice inf", "a 1 2"])
def test_a_bad_weight_names_its_line(tmp_path: Path, rest: str) -> None:
    path = tmp_path / "keys"
    path.write_text(f"{digest('one')} {rest}\n")
    with pytest.raises(ValueError, match="line 1"):
        ApiKeys.load(str(path))
