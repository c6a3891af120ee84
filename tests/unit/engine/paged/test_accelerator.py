"""What is asked of CUDA, and in which order: as torch's notes on graphs want it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from engine.paged.accelerator import CudaAccelerator, HostAccelerator, accelerator_of

DEVICE = torch.device("cuda:0")


class _Stream:
    def __init__(self, name: str, told: list[str]) -> None:
        self.name = name
        self._told = told

    def wait_stream(self, other: "_Stream") -> None:
        self._told.append(f"{self.name} waits for {other.name}")


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a fake `torch.cuda` was asked for."""
    told: list[str] = []
    streams = [_Stream("main", told)]
    modes = [0]

    @contextmanager
    def stream(entered: _Stream) -> Iterator[None]:
        told.append(f"on {entered.name}")
        streams.append(entered)
        yield
        streams.pop()

    @contextmanager
    def graph(_: object, *, pool: str, capture_error_mode: str) -> Iterator[None]:
        told.append(f"capture in {pool}, errors {capture_error_mode}, syncs {modes[-1]}")
        yield
        told.append("captured")

    def set_mode(mode: Any) -> None:
        modes.append(mode)
        told.append(f"syncs {mode}")

    class _Event:
        def __init__(self, *, blocking: bool) -> None:
            assert blocking, "waiting must not spin"

        def record(self, recorded: _Stream) -> None:
            told.append(f"event on {recorded.name}")

    fakes = {
        "current_stream": lambda _: streams[-1],
        "Stream": lambda _: _Stream("side", told),
        "stream": stream,
        "CUDAGraph": object,
        "graph": graph,
        "graph_pool_handle": lambda: told.append("pool made") or "pool",
        "get_sync_debug_mode": lambda: modes[-1],
        "set_sync_debug_mode": set_mode,
        "Event": _Event,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    return told


def test_a_capture_warms_up_beside_the_main_stream_and_shares_one_pool(told: list[str]):
    accelerator = CudaAccelerator(DEVICE)
    for _ in range(2):
        accelerator.capture(lambda: told.append("run"))
    first = [
        "side waits for main",
        "on side",
        "run",
        "syncs error",
        "run",
        "syncs 0",
        "main waits for side",
    ]
    capture = ["capture in pool, errors thread_local, syncs 0", "run", "captured"]
    assert told == [*first, "pool made", *capture, *first, *capture]


def test_what_waits_for_the_device_is_never_captured(told: list[str]):
    def run() -> None:
        if told[-1] == "syncs error":
            raise RuntimeError("called a synchronizing CUDA operation")
        told.append("run")

    with pytest.raises(RuntimeError, match="synchronizing"):
        CudaAccelerator(DEVICE).capture(run)
    assert told[-1] == "syncs 0", "others may wait again"
    assert not any(each.startswith("capture") for each in told)


def test_a_mark_is_on_the_stream_of_the_caller(told: list[str]):
    CudaAccelerator(DEVICE).mark()
    assert told == ["event on main"]


def test_each_device_has_its_own(told: list[str]):
    assert isinstance(accelerator_of(DEVICE), CudaAccelerator)
    assert isinstance(accelerator_of(torch.device("cpu")), HostAccelerator)
    assert told == []
