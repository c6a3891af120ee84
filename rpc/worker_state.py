"""What a worker of either pool says about itself: hello, prefix cache, load, metrics, spans.

engine thread --on_step--> EngineReporter --> StateFeed --WatchState--> ingresses
worker: links, transfers, counters ----------^
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from relevo.v1 import common_pb2, state_pb2

from engine.block_hash import BlockHash
from engine.config import EngineConfig
from engine.load import BlockEvents
from engine.memory_report import MemoryReport
from rpc.admission import Admission
from rpc.description import WorkerDescription
from rpc.engine_reporter import EngineReporter, ReportingEngine
from rpc.state_feed import StateFeed
from rpc.worker_load import HeartbeatLike, LinkStatusLike, to_worker_load
from rpc.worker_metrics import WorkerMetrics
from telemetry.span_outbox import SpanOutbox

MIN_RETRY_AFTER_S = 0.1


class DescribedEngine(ReportingEngine, Protocol):
    """What of an engine is told to others; none of it needs the engine's thread."""

    config: EngineConfig
    hash_root: BlockHash
    max_model_len: int
    memory: MemoryReport
    eos_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSources:
    """Where the parts of a worker are asked, whenever a load message is due."""

    heartbeat: Callable[[], HeartbeatLike]
    links: Callable[[], Iterable[LinkStatusLike]]
    num_transferring: Callable[[], int]
    num_promised_tokens: Callable[[], int] = lambda: 0  # of hand-overs that have no blocks yet
    metrics: WorkerMetrics
    spans: SpanOutbox
    export: Callable[[], None]  # brings the worker's own series up to date


class WorkerState:
    """Owns the state feed of one worker. Use it on one event loop, except `on_step`."""

    def __init__(
        self,
        engine: DescribedEngine,
        *,
        description: WorkerDescription,
        layout: common_pb2.KVLayout,
        bytes_per_token: int,
        admission: Admission,
        sources: StateSources,
    ) -> None:
        self._engine = engine
        self._description = description
        self._layout = layout
        self._bytes_per_token = bytes_per_token
        self._admission = admission
        self._sources = sources
        self._reporter = EngineReporter(engine, on_report=self._publish)
        self.on_step = self._reporter.on_step  # for the engine's thread
        self.feed = StateFeed(
            hello=self._hello,
            load=self._load,
            metric_samples=self._metric_samples,
            spans=sources.spans,
        )

    def retry_after_s(self) -> float:
        """How long the prompts that wait here will take."""
        load = self._reporter.load
        wait_s = load.num_waiting_uncached_tokens / max(1.0, load.prefill_tokens_per_s)
        return max(MIN_RETRY_AFTER_S, wait_s)

    def _publish(self, events: BlockEvents) -> None:
        if events:
            self.feed.publish(removed=events.removed, stored=events.stored, cleared=events.cleared)
        self.feed.touch()

    def _hello(self) -> state_pb2.WatchStateResponse.Hello:
        config, memory = self._engine.config, self._engine.memory
        return state_pb2.WatchStateResponse.Hello(
            worker=self._description.to_ref(),
            layout=self._layout,
            pool=self._description.pool,
            max_num_seqs=config.max_num_seqs,
            max_model_len=self._engine.max_model_len,
            num_kv_blocks=self._reporter.load.blocks.total,
            hash_root=self._engine.hash_root,
            max_num_batched_tokens=config.max_num_batched_tokens,
            kv_bytes_per_token=self._bytes_per_token,
            memory=state_pb2.MemoryReport(
                weights_bytes=memory.weights_bytes,
                kv_bytes=memory.kv_bytes,
                buffer_bytes=memory.buffer_bytes,
                max_concurrency=memory.max_concurrency,
            ),
            eos_token_ids=self._engine.eos_token_ids,
        )

    def _load(self) -> state_pb2.WorkerLoad:
        return to_worker_load(
            self._reporter.load,
            description=self._description,
            state=self._admission.state,
            num_transferring=self._sources.num_transferring(),
            num_promised_tokens=self._sources.num_promised_tokens(),
            heartbeat=self._sources.heartbeat(),
            links=self._sources.links(),
        )

    def _metric_samples(self) -> list[state_pb2.MetricSample]:
        sources = self._sources
        sources.metrics.set_load(self._reporter.load, num_transferring=sources.num_transferring())
        sources.export()
        return sources.metrics.samples()
