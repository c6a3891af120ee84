"""One JSON line per finished request: who, how large, how long, where; never what it said.

The first four fields are those of a Mooncake trace, so a file of these lines can be replayed.
"""

import hashlib
import logging
import os
import time
from array import array
from collections.abc import Callable, Sequence
from logging.handlers import RotatingFileHandler
from typing import Final

import orjson

from api.text_stream import TextStream
from router.report import RequestReport
from router.request import RoutedRequest
from telemetry import tracing

HASH_BLOCK_TOKENS: Final = 512  # what one of the hash ids stands for
MAX_FILE_BYTES: Final = 64 * 1024 * 1024
NUM_OLD_FILES: Final = 4
_HASH_BYTES = 6  # as a number it is exact in every JSON reader

_LOGGER = logging.getLogger("relevo.requests")


class RequestLog:
    """Writes to a file of its own, which is rotated, or else into the ordinary log."""

    def __init__(self, path: str = "", *, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._started_at_s = now()
        # Equal prompts get equal ids from one ingress; to anybody else an id says nothing.
        self._key = os.urandom(16)
        self._handler: RotatingFileHandler | None = None
        if path:
            self._handler = RotatingFileHandler(
                path, maxBytes=MAX_FILE_BYTES, backupCount=NUM_OLD_FILES, delay=True
            )

    def write(self, request: RoutedRequest, stream: TextStream) -> None:
        """Write down one request that is over."""
        if self._handler is None and not _LOGGER.isEnabledFor(logging.INFO):
            return
        arrived_at_s = self._now() if request.arrived_at is None else request.arrived_at
        fields = {
            "timestamp": max(round(1e3 * (arrived_at_s - self._started_at_s)), 0),
            "input_length": len(request.token_ids),
            "output_length": stream.num_tokens,
            "hash_ids": self._hash_ids(request.token_ids, request.cache_salt),
            "ended_at": round(time.time(), 3),
            "label": request.request_label,
            "trace_id": ""
            if (seen := request.trace_context) is None
            else tracing.trace_id_of(seen),
            "tenant": request.tenant,
            "priority": request.priority,
            "num_choices": request.num_choices,
            "finish_reasons": [choice.finish_reason for choice in stream.choices],
            **_outcome(stream.report),
        }
        line = orjson.dumps(fields).decode()
        if self._handler is None:
            _LOGGER.info("%s", line)
        else:
            self._handler.emit(logging.makeLogRecord({"msg": line}))

    def close(self) -> None:
        """Close the file."""
        if self._handler is not None:
            self._handler.close()

    def _hash_ids(self, token_ids: Sequence[int], cache_salt: str) -> list[int]:
        """An id for each 512 tokens, the last fewer; it covers all tokens before them, too."""
        running = hashlib.blake2b(cache_salt.encode(), key=self._key, digest_size=_HASH_BYTES)
        ids = []
        for start in range(0, len(token_ids), HASH_BLOCK_TOKENS):
            running.update(array("I", token_ids[start : start + HASH_BLOCK_TOKENS]).tobytes())
            ids.append(int.from_bytes(running.digest()))
        return ids


def _outcome(report: RequestReport) -> dict[str, object]:
    return {
        "request_id": report.request_id,
        "ended": report.finish_reason,
        "prefill_worker": report.prefill_worker_id,
        "decode_worker": report.last_decode_worker_id or report.decode_worker_id,
        "num_attempts": report.num_attempts,
        "num_migrations": report.num_migrations,
        "cached_prefill_tokens": report.cached_prefill,
        "cached_decode_tokens": report.cached_decode,
        "kv_transfer_bytes": report.kv_transfer_bytes,
        "first_token_s": report.first_token_s,
        "first_token_parts_s": report.first_token_parts,
        "second_token_s": report.second_token_s,
        "second_token_parts_s": report.second_token_parts,
        "kv_transfer_s": report.kv_transfer_s,
        "duration_s": report.elapsed_s,
    }
