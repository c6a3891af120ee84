"""The keys file and the judgement of headers."""

import hashlib
from pathlib import Path

import pytest

from api.api_keys import ApiKeys
from api.errors import ApiError


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
    keys = ApiKeys([digest("one")])
    for key in ("\udcff", "ž", "x" * 100_000):
        with pytest.raises(ApiError):
            keys.check([f"Bearer {key}"])
