"""One request of a batch over HTTP: its answer, a refusal to come back from, or a failure."""

import ssl
from dataclasses import dataclass
from typing import Any, Final

import aiohttp
import orjson

from batch.input_file import InputLine

REFUSALS: Final = frozenset({429, 503, 529})
CONNECT_WITHIN_S: Final = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What the server said."""

    status: int
    body: Any  # JSON
    request_id: str = ""
    retry_after_s: float | None = None

    @property
    def is_refusal(self) -> bool:
        """Whether the same request may succeed later."""
        return self.status in REFUSALS

    @property
    def is_alive(self) -> bool:
        """Whether the server serves others meanwhile."""
        return self.status != 503

    @property
    def is_broken(self) -> bool:
        """Whether the server, and not the request, is to blame."""
        return self.status >= 500


class Sender:
    """Connections to one server; use it in `async with`."""

    def __init__(self, url: str, *, api_key: str = "", priority: int, timeout_s: float) -> None:
        self._url = url.rstrip("/").removesuffix("/v1")
        self._priority = priority
        self._headers = {"content-type": "application/json"}
        if api_key:
            self._headers["authorization"] = f"Bearer {api_key}"
        self._timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_WITHIN_S)

    async def __aenter__(self) -> "Sender":
        is_tls = self._url.startswith("https:")
        connector = aiohttp.TCPConnector(
            limit=0, ssl=ssl.create_default_context() if is_tls else False
        )
        self._session = aiohttp.ClientSession(
            connector=connector, headers=self._headers, timeout=self._timeout
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def send(self, line: InputLine) -> Answer:
        """Send one request; ConnectionError where no answer came."""
        assert line.body is not None
        body = line.body
        if self._priority and "priority" not in body:
            body = {**body, "priority": self._priority}
        try:
            async with self._session.post(self._url + line.url, data=orjson.dumps(body)) as got:
                return Answer(
                    status=got.status,
                    body=_read(await got.read()),
                    request_id=got.headers.get("x-request-id", ""),
                    retry_after_s=_seconds(got.headers.get("retry-after", "")),
                )
        except (aiohttp.ClientError, OSError) as error:
            raise ConnectionError(f"no answer: {type(error).__name__}: {error}") from error


def _read(data: bytes) -> Any:
    try:
        return orjson.loads(data)
    except ValueError:
        return {"error": {"message": data[:200].decode(errors="replace")}}


def _seconds(text: str) -> float | None:
    try:
        return max(float(text), 0.0)
    except ValueError:
        return None
