"""Clients that stream one answer after the other, whatever is done to the server meanwhile."""

import json
import threading
import time
import uuid
from typing import Any

import httpx

PAUSE_S = 0.2  # before what nobody took is asked again


class Callers:
    """So many of them while entered. Each request is answered, lost, or was taken by nobody."""

    def __init__(
        self, url: str, number: int, body: dict[str, Any], *, is_cold: bool = True
    ) -> None:
        self.texts: list[str] = []  # of answers that came to their end
        self.lost: list[str] = []  # taken and not brought to its end
        self.num_not_taken = 0  # no connection, or 503 at once: a client's own retry
        self._url = f"{url}/v1/completions"
        self._body = body | {"stream": True}
        self._is_cold = is_cold  # nobody has any prompt's KV
        self._is_over = threading.Event()
        self._threads = [threading.Thread(target=self._call) for _ in range(number)]

    def __enter__(self) -> "Callers":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()

    def _call(self) -> None:
        while not self._is_over.is_set():
            text, is_taken = "", False
            try:
                body = self._body | ({"cache_salt": uuid.uuid4().hex} if self._is_cold else {})
                with httpx.stream("POST", self._url, json=body, timeout=120) as response:
                    if response.status_code == httpx.codes.SERVICE_UNAVAILABLE:
                        raise httpx.ConnectError("not ready")
                    is_taken = True
                    text, end = _read(response)
                if end == "length":
                    self.texts.append(text)
                else:
                    self.lost.append(f"{end} after {text!r}")
            except httpx.TransportError as error:
                if is_taken:
                    self.lost.append(f"{error!r} after {text!r}")
                else:
                    self.num_not_taken += 1
                    time.sleep(PAUSE_S)


def _read(response: httpx.Response) -> tuple[str, str]:
    """The text of a stream and why it ended; an error in it is such a reason."""
    text, end = "", f"status {response.status_code}"
    for line in response.iter_lines():
        data = line.removeprefix("data: ")
        if not line or data == "[DONE]":
            continue
        event = json.loads(data)
        if "choices" not in event:
            return text, data
        for choice in event["choices"]:
            text += choice["text"]
            end = choice["finish_reason"] or end
    return text, end
