"""What a client of one ingress sees: answers, verdicts, events."""

import contextlib
import itertools
import json
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import grpc
import httpx
from relevo.v1 import inference_pb2, inference_pb2_grpc

from tests.patience import naps

Body = Mapping[str, Any]

QUIET_WITHIN_S = 5.0
_GRPC_STATUSES = {
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 429,
}
_NUMBERS = itertools.count()


@dataclass(frozen=True, slots=True)
class Answer:
    """The choices of one answer without what differs between two equal ones, and its usage."""

    choices: list[dict[str, Any]]
    usage: dict[str, int]


def own_salt() -> str:
    """A cache salt nobody has used: the request finds nothing cached."""
    return f"salt-{next(_NUMBERS)}"


class Client:
    """Talks HTTP and gRPC to one ingress; any thread may use it."""

    def __init__(self, http_port: int, grpc_port: int) -> None:
        url = f"http://127.0.0.1:{http_port}"
        self.http = httpx.Client(base_url=url, timeout=60.0, verify=False)
        self._channel = grpc.insecure_channel(f"127.0.0.1:{grpc_port}")
        self.stub = inference_pb2_grpc.InferenceServiceStub(self._channel)

    def close(self) -> None:
        self.http.close()
        self._channel.close()

    # HTTP

    def post(self, body: Body) -> httpx.Response:
        return self.http.post("/v1/completions", json={"model": "tiny", **body})

    def complete(self, body: Body) -> Answer:
        response = self.post(body)
        assert response.status_code == 200, response.text
        return _answer(response.json())

    def complete_all(self, bodies: Sequence[Body]) -> list[Answer]:
        """All at once."""
        with ThreadPoolExecutor(len(bodies)) as threads:
            return list(threads.map(self.complete, bodies))

    def beside(self, body: Body, others: Sequence[Body]) -> Answer:
        """One answer, asked for in the middle of others that may be of any kind."""
        with ThreadPoolExecutor(len(others) + 1) as threads:
            posted = [threads.submit(self.post, other) for other in others]
            answer = self.complete(body)
            for each in posted:
                each.result()
        return answer

    def leave(self, body: Body, *, after_s: float) -> None:
        """Ask, and go away after a while."""
        with contextlib.suppress(httpx.ReadTimeout):
            self.http.post("/v1/completions", json={"model": "tiny", **body}, timeout=after_s)

    def stream(self, body: Body) -> list[dict[str, Any]]:
        """The events of a stream, which must end with [DONE] and nothing behind it."""
        options = {"stream": True, "stream_options": {"include_usage": True}}
        response = self.post({**body, **options})
        assert response.status_code == 200, response.text
        lines = [line for line in response.text.split("\n\n") if line.startswith("data: ")]
        assert lines[-1] == "data: [DONE]"
        return [_rounded(json.loads(line.removeprefix("data: "))) for line in lines[:-1]]

    # gRPC

    def status(self, generation: Body) -> int:
        """The HTTP status that a unary call's verdict stands for."""
        message = inference_pb2.Generation(**{"model": "tiny", **generation})
        try:
            self.stub.Generate(inference_pb2.GenerateRequest(generation=message), timeout=60)
        except grpc.RpcError as error:
            return _GRPC_STATUSES.get(error.code(), 500)
        return 200

    # Books

    def wait_until_quiet(self) -> None:
        """Within seconds nothing runs and no block is owned; the sums hold all the time."""
        for _ in naps(QUIET_WITHIN_S, 0.05):
            workers = self.http.get("/v1/loads").json()["workers"]
            for worker in workers:
                blocks = worker["blocks"]
                assert sum(blocks.values()) == 2 * blocks["total"], blocks
            if not any(_num_busy(worker) for worker in workers):
                return
            time.sleep(0.05)
        raise AssertionError(f"the pools are not quiet: {workers}")


def _answer(body: dict[str, Any]) -> Answer:
    usage = body["usage"]
    names = ("prompt_tokens", "completion_tokens", "total_tokens")
    return Answer(choices=_rounded(body["choices"]), usage={name: usage[name] for name in names})


def _rounded(value: Any) -> Any:
    """The same without the last bits of its numbers: sums in other batches end in other ones."""
    if isinstance(value, float):
        return round(value, 6)
    if isinstance(value, list):
        return [_rounded(each) for each in value]
    if isinstance(value, dict):
        return {name: _rounded(each) for name, each in value.items()}
    return value


def _num_busy(worker: dict[str, Any]) -> int:
    blocks = worker["blocks"]
    owned = blocks["used"] + blocks["held"] + blocks["quarantined"]
    return owned + worker["num_running"] + worker["num_waiting"]
