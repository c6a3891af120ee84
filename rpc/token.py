"""The secret that all processes of one cluster share, in a file that only its owner can read."""

import os
import secrets
import stat
from pathlib import Path

_NUM_BYTES = 32
_MIN_CHARS = 16


def create_token(path: str | Path) -> str:
    """Make the file with a new random token and mode 0600; a file that is there stays as it is."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Written aside and linked into place: nobody ever reads a file without its token.
    draft = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_urlsafe(_NUM_BYTES) + "\n")
        os.link(draft, path)
    except FileExistsError:
        pass
    finally:
        draft.unlink()
    return read_token(path)


def read_token(path: str | Path) -> str:
    """Return the token; ValueError when the file is unsafe to rely on."""
    path = Path(path)
    with path.open() as file:
        status = os.fstat(file.fileno())
        mode = stat.S_IMODE(status.st_mode)
        # Kubernetes' secrets belong to root, and a pod reads them through a group of its own.
        allowed = 0o700 if status.st_uid == os.geteuid() else 0o740
        if mode & ~allowed:
            raise ValueError(f"Got mode {mode:04o} for {path} but expected 0600: chmod 600 {path}")
        token = file.read().strip()
    if len(token) < _MIN_CHARS or not token.isascii() or not token.isprintable():
        raise ValueError(f"Got no token in {path} but expected at least {_MIN_CHARS} characters")
    return token
