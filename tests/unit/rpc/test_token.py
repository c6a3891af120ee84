"""The token file."""

import os

import pytest

from rpc.token import create_token, read_token


def test_a_new_token_is_long_and_only_its_owner_reads_it(tmp_path):
    path = tmp_path / "made" / "token"
    token = create_token(path)
    assert len(token) >= 40
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_token(path) == token
    assert os.listdir(path.parent) == ["token"]


def test_making_it_again_keeps_the_token(tmp_path):
    assert create_token(tmp_path / "token") == create_token(tmp_path / "token")


def test_two_tokens_differ(tmp_path):
    assert create_token(tmp_path / "a") != create_token(tmp_path / "b")


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o660])
def test_a_file_that_others_can_read_is_refused(tmp_path, mode):
    path = tmp_path / "token"
    create_token(path)
    path.chmod(mode)
    with pytest.raises(ValueError, match="0600"):
        read_token(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
@pytest.mark.parametrize(("mode", "is_safe"), [(0o440, True), (0o460, False), (0o444, False)])
def test_a_secret_that_a_group_lends_us_may_be_read_by_that_group_alone(tmp_path, mode, is_safe):
    path = tmp_path / "token"
    token = create_token(path)
    path.chmod(mode)
    os.chown(path, 12345, 12345)
    if is_safe:
        assert read_token(path) == token
    else:
        with pytest.raises(ValueError, match="0600"):
            read_token(path)


@pytest.mark.parametrize("text", ["", "\n", "short\n", "ü" * 40, "line one is long\nline two"])
def test_a_file_without_a_token_is_refused(tmp_path, text):
    path = tmp_path / "token"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(ValueError, match="no token"):
        read_token(path)


def test_a_missing_file_says_so(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_token(tmp_path / "token")
