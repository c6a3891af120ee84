"""What a replica is made of, as one word: Serve replaces those whose word is another."""

import hashlib

import orjson

from api.build import this_build

VERSION_DIGITS = 16


def version_of(*settings: object, salt: str = "") -> str:
    """Equal for replicas that are made of the same settings by the same code.

    `settings` are plain data or dataclasses of it.
    """
    body = orjson.dumps([this_build().digest, salt, settings], option=orjson.OPT_SORT_KEYS)
    return hashlib.sha256(body).hexdigest()[:VERSION_DIGITS]
