"""Clients that ask again and again, whatever is done to the server, and count what went wrong.

Each in a way of its own: over one connection that is kept, or over a new one for each request. None
of them tries anything twice.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import grpc
import httpx
from relevo.v1 import inference_pb2, inference_pb2_grpc

WAYS = ("kept_http", "new_http", "kept_grpc", "new_grpc")
WITHIN_S = 60


class SteadyClient:
    """One of them, from its start to `stop`."""

    def __init__(self, way: str, *, ports: tuple[int, int], max_tokens: int) -> None:
        self.texts: list[str] = []  # of the answers
        self.failures: list[str] = []
        self._http_url = f"http://127.0.0.1:{ports[0]}"
        self._grpc_target = f"127.0.0.1:{ports[1]}"
        self._body = {
            "model": "tiny",
            "prompt": "The quick brown fox",
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
        }
        self._generation = inference_pb2.Generation(
            model="tiny",
            text="The quick brown fox",
            max_tokens=max_tokens,
            temperature=0.0,
            ignore_eos=True,
        )
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=getattr(self, f"_{way}"))
        self._thread.start()

    def stop(self) -> None:
        """Let the last request end."""
        self._is_over.set()
        self._thread.join()

    def _kept_http(self) -> None:
        with self._http() as client:
            while not self._is_over.is_set():
                self._ask_http(client)

    def _new_http(self) -> None:
        while not self._is_over.is_set():
            with self._http() as client:
                self._ask_http(client)

    def _kept_grpc(self) -> None:
        with self._channel() as channel:
            while not self._is_over.is_set():
                if not self._ask_grpc(channel):
                    # A channel that could not connect fails every call of the next second unasked.
                    grpc.channel_ready_future(channel).result(WITHIN_S)

    def _new_grpc(self) -> None:
        while not self._is_over.is_set():
            with self._channel() as channel:
                self._ask_grpc(channel)

    def _http(self) -> httpx.Client:
        return httpx.Client(base_url=self._http_url, verify=False, timeout=WITHIN_S)

    def _channel(self) -> grpc.Channel:
        options = (("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0))
        return grpc.insecure_channel(self._grpc_target, options=options)

    def _ask_http(self, client: httpx.Client) -> None:
        try:
            answer = client.post("/v1/completions", json=self._body)
            if answer.is_success:
                self.texts.append(answer.json()["choices"][0]["text"])
            else:
                self.failures.append(answer.text)
        except httpx.TransportError as error:
            self.failures.append(repr(error))

    def _ask_grpc(self, channel: grpc.Channel) -> bool:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        request = inference_pb2.GenerateStreamRequest(generation=self._generation)
        try:
            parts = stub.GenerateStream(request, timeout=WITHIN_S)
            self.texts.append("".join(part.text for part in parts))
        except grpc.RpcError as error:
            self.failures.append(repr(error))
            return False
        return True


@contextmanager
def steady_clients(
    ports: tuple[int, int], *, max_tokens: int = 100
) -> Iterator[dict[str, SteadyClient]]:
    """One of each way, by its name; `ports` are those of HTTP and gRPC."""
    clients = {way: SteadyClient(way, ports=ports, max_tokens=max_tokens) for way in WAYS}
    try:
        yield clients
    finally:
        for client in clients.values():
            client.stop()


def wait_until_answered(clients: dict[str, SteadyClient], *, times: int, within_s: float) -> None:
    """Until each of them was answered `times` times from now on, however fast the machine is."""
    wanted = {way: len(client.texts) + times for way, client in clients.items()}
    end_s = time.monotonic() + within_s
    while any(len(client.texts) < wanted[way] for way, client in clients.items()):
        told = {way: (len(client.texts), client.failures) for way, client in clients.items()}
        assert time.monotonic() < end_s, (wanted, told)
        time.sleep(0.02)
