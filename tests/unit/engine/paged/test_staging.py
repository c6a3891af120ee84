"""Numbers on their way to a device that is as late as it can be."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.paged.accelerator import HostAccelerator
from engine.paged.staging import Layout, Staging
from tests.lazy_accelerator import LazyAccelerator

CPU = torch.device("cpu")


def arrays_of(seed: int, lengths: list[int]) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(seed)
    made = {f"int{n}": generator.integers(0, 99, size=size) for n, size in enumerate(lengths)}
    return {
        **made,
        "table": generator.integers(0, 99, size=(2, 3)).astype(np.int32),
        "columns": generator.random((2, len(lengths))),
    }


@settings(max_examples=60, deadline=None)
@given(
    uploads=st.lists(st.tuples(st.lists(st.integers(0, 40), max_size=3), st.booleans()), max_size=9)
)
def test_no_copy_reads_what_came_later(uploads: list[tuple[list[int], bool]]):
    device = LazyAccelerator()
    staging = Staging(device, CPU)
    sent = []
    for seed, (lengths, waits) in enumerate(uploads):
        arrays = arrays_of(seed, lengths)
        expected = {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}
        sent.append((expected, staging.upload(arrays)))
        for array in arrays.values():
            array[:] = 0  # the caller's own memory is free at once
        if waits:
            device.mark().synchronize()
    device.mark().synchronize()
    for expected, views in sent:
        assert views.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(views[name], tensor), name
            assert views[name].data_ptr() % 16 == 0


def test_two_steps_are_sent_without_waiting_and_a_third_waits_for_the_first():
    device = LazyAccelerator()
    staging = Staging(device, CPU)
    for seed in range(2):
        staging.upload(arrays_of(seed, [4]))
    assert device.done == []
    staging.upload(arrays_of(2, [4]))
    assert device.done == ["copy"]


def test_memory_of_the_host_grows_seldom():
    device = LazyAccelerator()
    staging = Staging(device, CPU)
    for length in range(1, 200):
        staging.upload(arrays_of(0, [length]))
    assert device.host_bytes < 20_000


def test_arrays_go_where_they_are_wanted():
    staging = Staging(HostAccelerator(), CPU)
    arrays = arrays_of(1, [5, 0])
    memory = torch.zeros(Layout.of(arrays).num_bytes, dtype=torch.uint8)
    views = staging.upload(arrays, into=memory)
    assert views["columns"].dtype is torch.float64
    for name, view in Layout.of(arrays).views(memory, arrays).items():
        assert view.data_ptr() == views[name].data_ptr()
        assert torch.equal(view, torch.from_numpy(arrays[name])), name
