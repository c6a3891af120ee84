"""Decode steps as graphs, on a device that is as late as it can be."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from engine.batch import Batch
from engine.engine import Engine
from engine.kv_cache import KVCache, KVCacheSpec
from engine.layer_attention import LayerAttention
from engine.paged.accelerator import Accelerator, HostAccelerator
from engine.paged.graphs import DecodeGraphs, graph_sizes
from engine.paged.inputs import PagedInputs
from engine.paged.sampling import NUM_COLUMNS
from engine.paged.step_arrays import make_step_arrays
from engine.request import Request
from engine.schedule import Schedule, ScheduledRequest
from tests.lazy_accelerator import LazyAccelerator
from tests.paged_kernel import reference_kernel
from tests.unit.engine.conftest import make_request, random_prompt, run, tokens_by_request

SPEC = KVCacheSpec(
    num_layers=2, num_kv_heads=1, head_dim=4, block_size=4, dtype="float64", device="cpu"
)
VOCAB_SIZE, MAX_LEN, NUM_BLOCKS, MAX_SEQS = 16, 20, 24, 10
EMBEDDING = torch.randn(
    3, VOCAB_SIZE + MAX_LEN, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3)
)


def forward(batch: Batch) -> torch.Tensor:
    """Two layers of nothing but attention; a token's value depends on its place and all before."""
    query, key, value = (
        (table[batch.token_ids[0]] + table[VOCAB_SIZE + batch.position_ids[0]])[None]
        for table in EMBEDDING
    )
    for index in range(SPEC.num_layers):
        attended = batch.attention.attend(LayerAttention(index, 0.5), query, key, value)
        query = query + attended.transpose(0, 1)
    return query[0, batch.sample_index] @ EMBEDDING[0, :VOCAB_SIZE].T


def columns_of(rows: Sequence[object]) -> dict[str, np.ndarray]:
    return {"columns": np.zeros((NUM_COLUMNS, len(rows)))}


def make_graphs(
    accelerator: Accelerator, cache: KVCache, **changes: object
) -> tuple[DecodeGraphs, PagedInputs]:
    inputs = PagedInputs(
        reference_kernel, accelerator, device=torch.device("cpu"), max_num_seqs=MAX_SEQS
    )
    settings_ = {"forward": forward, "max_model_len": MAX_LEN, "max_num_seqs": MAX_SEQS, **changes}
    own_forward = settings_.pop("forward")
    graphs = DecodeGraphs(own_forward, inputs, cache, **settings_)  # type: ignore[arg-type]
    graphs.capture()
    return graphs, inputs


@pytest.mark.parametrize("max_num_seqs", [1, 2, 3, 7, 8, 9, 16, 100, 256, 1000])
def test_few_sizes_and_few_rows_of_nobody(max_num_seqs: int):
    sizes = graph_sizes(max_num_seqs)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == max_num_seqs
    assert len(sizes) <= 4 * max_num_seqs.bit_length()
    for rows in range(1, max_num_seqs + 1):
        size = next(size for size in sizes if size >= rows)
        assert size <= max(2 * rows, 8) if rows <= 8 else size - rows <= max(7, rows // 4)


class GraphMachine(RuleBasedStateMachine):
    """Steps of any requests, two of them in the air at once, against forwards made at once."""

    @initialize()
    def begin(self) -> None:
        with torch.inference_mode():
            self.device = LazyAccelerator()
            self.cache = KVCache(SPEC, NUM_BLOCKS, has_scratch_block=True)
            self.graphs, self.inputs = make_graphs(self.device, self.cache)
            self.truth = KVCache(SPEC, NUM_BLOCKS, has_scratch_block=True)
            self.plain = PagedInputs(
                reference_kernel,
                HostAccelerator(),
                device=torch.device("cpu"),
                max_num_seqs=MAX_SEQS,
            )
        self.free = list(range(NUM_BLOCKS))
        self.running: list[Request] = []
        self.in_the_air: list[tuple[Any, list[torch.Tensor], torch.Tensor, torch.Tensor]] = []

    @rule(token_id=st.integers(0, VOCAB_SIZE - 1))
    def arrive(self, token_id: int) -> None:
        if len(self.running) < MAX_SEQS and len(self.free) >= MAX_LEN // 4:
            request = make_request("r", [token_id])
            self.running.append(request)

    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        if self.running:
            request = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
            self.free += request.block_ids

    @rule(data=st.data())
    @torch.inference_mode()
    def step(self, data: st.DataObject) -> None:
        """Launch a step of some of them; the one before the last must have landed."""
        mine = [request for request in self.running if data.draw(st.booleans())]
        if not mine:
            return
        if len(self.in_the_air) == 2:
            self.land()
        schedule = Schedule()
        for request in mine:
            if request.num_tokens > 4 * len(request.block_ids):
                request.block_ids.append(self.free.pop(0))
                schedule.new_block_ids.append(request.block_ids[-1])
            schedule.scheduled.append(
                ScheduledRequest(
                    request=request, start=request.num_tokens - 1, end=request.num_tokens
                )
            )
        arrays = make_step_arrays(schedule, self.truth, {})
        batch = self.plain.batch(arrays, self.plain.staging.upload(arrays.arrays), self.truth)
        expected = forward(batch)
        queued = self.graphs.run(
            schedule, make_step_arrays(schedule, self.cache, {}), columns_of(mine)
        )
        assert queued is not None
        kept: list[torch.Tensor] = []
        size = next(size for size in self.graphs.sizes if size >= len(mine))
        results = self.graphs._captured[size].results
        self.device.queue("keep", lambda: kept.append(results[0][: len(mine)].clone()))
        pool = self.truth.tensor.clone()
        self.in_the_air.append((self.device.mark(), kept, expected, pool))
        for request in mine:
            if request.num_tokens < MAX_LEN:
                request.token_ids.append(data.draw(st.integers(0, VOCAB_SIZE - 1)))
            else:
                self.running.remove(request)
                self.free += request.block_ids

    @rule()
    @torch.inference_mode()
    def land(self) -> None:
        if self.in_the_air:
            mark, kept, expected, pool = self.in_the_air.pop(0)
            mark.synchronize()
            assert torch.allclose(kept[0], expected, rtol=0, atol=1e-12)
            # Rows of nobody have written to nobody's blocks.
            assert torch.allclose(self.cache.tensor, pool, rtol=0, atol=1e-12)

    @invariant()
    def nobody_writes_the_padding(self) -> None:
        padding = self.cache._storage[self.cache.padding_block_id]
        assert not padding.any()


TestGraphMachine = GraphMachine.TestCase
TestGraphMachine.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)


def test_a_step_that_no_graph_fits_runs_without():
    cache = KVCache(SPEC, NUM_BLOCKS, has_scratch_block=True)
    with torch.inference_mode():
        graphs, _ = make_graphs(HostAccelerator(), cache)

    def share(start: int, end: int, known: int) -> ScheduledRequest:
        request = make_request("r", [1] * known)
        request.block_ids = [3, 4]
        return ScheduledRequest(request=request, start=start, end=end)

    def runs(scheduled: Sequence[ScheduledRequest], new_block_ids: Sequence[int] = ()) -> bool:
        schedule = Schedule(scheduled=list(scheduled), new_block_ids=list(new_block_ids))
        with torch.inference_mode():
            return (
                graphs.run(schedule, make_step_arrays(schedule, cache, {}), columns_of(scheduled))
                is not None
            )

    assert runs([share(4, 5, 5)])
    assert not runs([share(4, 5, 5), share(0, 2, 2)]), "a piece of a prompt"
    assert not runs([share(4, 5, 6)]), "one token of a prompt that goes on"
    assert not runs([share(4, 5, 5)], [1, 2]), "more new blocks than rows"
    assert not runs([share(4, 5, 5)] * (MAX_SEQS + 1)), "more rows than any graph"


@pytest.mark.parametrize("by_graph", [True, False])
@torch.inference_mode()
def test_new_blocks_are_wiped_and_no_others(*, by_graph: bool):
    cache = KVCache(SPEC, NUM_BLOCKS, has_scratch_block=True)
    graphs, inputs = make_graphs(HostAccelerator(), cache)
    cache.tensor.fill_(7.0)
    request = make_request("r", [1] * 5)
    request.block_ids = [3, 6]
    share = ScheduledRequest(request=request, start=4, end=5)
    schedule = Schedule(scheduled=[share], new_block_ids=[6])
    step = make_step_arrays(schedule, cache, {})
    if by_graph:
        assert graphs.run(schedule, step, columns_of([request])) is not None
    else:
        forward(inputs.batch(step, inputs.staging.upload(step.arrays), cache))
    assert not cache.tensor[6, :, :, 1:].any()
    assert (cache.tensor[6, :, :, 0] != 7.0).all()
    assert (torch.cat((cache.tensor[:6], cache.tensor[7:])) == 7.0).all()


def test_a_model_that_cannot_be_captured_runs_without_graphs(caplog: pytest.LogCaptureFixture):
    def refuse(_: Batch) -> torch.Tensor:
        raise RuntimeError("operation not permitted when stream is capturing")

    cache = KVCache(SPEC, NUM_BLOCKS, has_scratch_block=True)
    graphs, _ = make_graphs(HostAccelerator(), cache, forward=refuse)
    assert graphs.sizes == []
    assert "cannot be captured: they run without" in caplog.text


def test_a_start_does_not_wait_for_the_last_graph():
    clock = iter(range(0, 1000, 6))
    cache = KVCache(SPEC, NUM_BLOCKS, has_scratch_block=True)
    graphs, _ = make_graphs(LazyAccelerator(), cache, now=lambda: next(clock))
    assert graphs.sizes == [8, 10], "the largest: smaller steps run in them too"
    assert graphs.num_bytes > 0


@pytest.mark.parametrize("cuda_graphs", [True, False])
def test_graphs_change_no_token(
    make_engine: Callable[..., Engine],
    make_paged_engine: Callable[..., Engine],
    *,
    cuda_graphs: bool,
):
    plain = make_engine(attention="torch")
    paged = make_paged_engine(cuda_graphs=cuda_graphs)
    paged.warm_up()
    graphs = paged._launcher._graphs
    assert (graphs.sizes if graphs else None) == ([1, 2, 4, 8] if cuda_graphs else None)
    tokens = []
    for engine in (plain, paged):
        for n, length in enumerate((3, 8, 9, 30, 64)):
            engine.add_request(make_request(f"r{n}", random_prompt(length), max_tokens=5 + 3 * n))
        tokens.append(tokens_by_request(run(engine)))
    assert tokens[0] == tokens[1]
