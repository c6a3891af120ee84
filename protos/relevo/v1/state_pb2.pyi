from relevo.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WatchStateRequest(_message.Message):
    __slots__ = ("ingress_id",)
    INGRESS_ID_FIELD_NUMBER: _ClassVar[int]
    ingress_id: str
    def __init__(self, ingress_id: _Optional[str] = ...) -> None: ...

class WatchStateResponse(_message.Message):
    __slots__ = ("hello", "snapshot_chunk", "block_events", "load", "sequence", "spans")
    class Hello(_message.Message):
        __slots__ = ("worker", "layout", "pool", "max_num_seqs", "max_model_len", "num_kv_blocks", "hash_root", "max_num_batched_tokens", "kv_bytes_per_token", "memory", "eos_token_ids")
        WORKER_FIELD_NUMBER: _ClassVar[int]
        LAYOUT_FIELD_NUMBER: _ClassVar[int]
        POOL_FIELD_NUMBER: _ClassVar[int]
        MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
        MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
        NUM_KV_BLOCKS_FIELD_NUMBER: _ClassVar[int]
        HASH_ROOT_FIELD_NUMBER: _ClassVar[int]
        MAX_NUM_BATCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
        KV_BYTES_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
        MEMORY_FIELD_NUMBER: _ClassVar[int]
        EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
        worker: _common_pb2.WorkerRef
        layout: _common_pb2.KVLayout
        pool: str
        max_num_seqs: int
        max_model_len: int
        num_kv_blocks: int
        hash_root: bytes
        max_num_batched_tokens: int
        kv_bytes_per_token: int
        memory: MemoryReport
        eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
        def __init__(self, worker: _Optional[_Union[_common_pb2.WorkerRef, _Mapping]] = ..., layout: _Optional[_Union[_common_pb2.KVLayout, _Mapping]] = ..., pool: _Optional[str] = ..., max_num_seqs: _Optional[int] = ..., max_model_len: _Optional[int] = ..., num_kv_blocks: _Optional[int] = ..., hash_root: _Optional[bytes] = ..., max_num_batched_tokens: _Optional[int] = ..., kv_bytes_per_token: _Optional[int] = ..., memory: _Optional[_Union[MemoryReport, _Mapping]] = ..., eos_token_ids: _Optional[_Iterable[int]] = ...) -> None: ...
    class SnapshotChunk(_message.Message):
        __slots__ = ("block_hashes", "last")
        BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
        LAST_FIELD_NUMBER: _ClassVar[int]
        block_hashes: _containers.RepeatedScalarFieldContainer[bytes]
        last: bool
        def __init__(self, block_hashes: _Optional[_Iterable[bytes]] = ..., last: _Optional[bool] = ...) -> None: ...
    class BlockEvents(_message.Message):
        __slots__ = ("cleared", "removed", "stored")
        CLEARED_FIELD_NUMBER: _ClassVar[int]
        REMOVED_FIELD_NUMBER: _ClassVar[int]
        STORED_FIELD_NUMBER: _ClassVar[int]
        cleared: bool
        removed: _containers.RepeatedScalarFieldContainer[bytes]
        stored: _containers.RepeatedScalarFieldContainer[bytes]
        def __init__(self, cleared: _Optional[bool] = ..., removed: _Optional[_Iterable[bytes]] = ..., stored: _Optional[_Iterable[bytes]] = ...) -> None: ...
    HELLO_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_CHUNK_FIELD_NUMBER: _ClassVar[int]
    BLOCK_EVENTS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    hello: WatchStateResponse.Hello
    snapshot_chunk: WatchStateResponse.SnapshotChunk
    block_events: WatchStateResponse.BlockEvents
    load: WorkerLoad
    sequence: int
    spans: bytes
    def __init__(self, hello: _Optional[_Union[WatchStateResponse.Hello, _Mapping]] = ..., snapshot_chunk: _Optional[_Union[WatchStateResponse.SnapshotChunk, _Mapping]] = ..., block_events: _Optional[_Union[WatchStateResponse.BlockEvents, _Mapping]] = ..., load: _Optional[_Union[WorkerLoad, _Mapping]] = ..., sequence: _Optional[int] = ..., spans: _Optional[bytes] = ...) -> None: ...

class MemoryReport(_message.Message):
    __slots__ = ("weights_bytes", "kv_bytes", "buffer_bytes", "max_concurrency")
    WEIGHTS_BYTES_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    BUFFER_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_CONCURRENCY_FIELD_NUMBER: _ClassVar[int]
    weights_bytes: int
    kv_bytes: int
    buffer_bytes: int
    max_concurrency: int
    def __init__(self, weights_bytes: _Optional[int] = ..., kv_bytes: _Optional[int] = ..., buffer_bytes: _Optional[int] = ..., max_concurrency: _Optional[int] = ...) -> None: ...

class BlockCounts(_message.Message):
    __slots__ = ("free", "cached", "used", "held", "quarantined", "total")
    FREE_FIELD_NUMBER: _ClassVar[int]
    CACHED_FIELD_NUMBER: _ClassVar[int]
    USED_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    free: int
    cached: int
    used: int
    held: int
    quarantined: int
    total: int
    def __init__(self, free: _Optional[int] = ..., cached: _Optional[int] = ..., used: _Optional[int] = ..., held: _Optional[int] = ..., quarantined: _Optional[int] = ..., total: _Optional[int] = ...) -> None: ...

class LinkStatus(_message.Message):
    __slots__ = ("peer_id", "peer_incarnation", "state", "generation", "backend", "reason", "bandwidth_bytes_per_s", "latency_s", "queued_bytes", "moved_bytes")
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    PEER_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    BANDWIDTH_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    LATENCY_S_FIELD_NUMBER: _ClassVar[int]
    QUEUED_BYTES_FIELD_NUMBER: _ClassVar[int]
    MOVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    peer_id: str
    peer_incarnation: int
    state: str
    generation: int
    backend: str
    reason: str
    bandwidth_bytes_per_s: float
    latency_s: float
    queued_bytes: int
    moved_bytes: int
    def __init__(self, peer_id: _Optional[str] = ..., peer_incarnation: _Optional[int] = ..., state: _Optional[str] = ..., generation: _Optional[int] = ..., backend: _Optional[str] = ..., reason: _Optional[str] = ..., bandwidth_bytes_per_s: _Optional[float] = ..., latency_s: _Optional[float] = ..., queued_bytes: _Optional[int] = ..., moved_bytes: _Optional[int] = ...) -> None: ...

class MetricSample(_message.Message):
    __slots__ = ("name", "labels", "value")
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    name: str
    labels: _containers.ScalarMap[str, str]
    value: float
    def __init__(self, name: _Optional[str] = ..., labels: _Optional[_Mapping[str, str]] = ..., value: _Optional[float] = ...) -> None: ...

class WorkerLoad(_message.Message):
    __slots__ = ("state", "num_running", "num_waiting", "num_transferring", "num_waiting_uncached_tokens", "blocks", "prefill_tokens_per_s", "step_s", "heartbeat_age_s", "predicted_step_s", "links", "metrics", "pid", "node_id", "request_s", "kv_token_s", "rates_age_s", "num_promised_tokens", "num_computed_tokens")
    STATE_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_TRANSFERRING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_UNCACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    STEP_S_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_AGE_S_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_STEP_S_FIELD_NUMBER: _ClassVar[int]
    LINKS_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_S_FIELD_NUMBER: _ClassVar[int]
    KV_TOKEN_S_FIELD_NUMBER: _ClassVar[int]
    RATES_AGE_S_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMISED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    state: str
    num_running: int
    num_waiting: int
    num_transferring: int
    num_waiting_uncached_tokens: int
    blocks: BlockCounts
    prefill_tokens_per_s: float
    step_s: float
    heartbeat_age_s: float
    predicted_step_s: float
    links: _containers.RepeatedCompositeFieldContainer[LinkStatus]
    metrics: _containers.RepeatedCompositeFieldContainer[MetricSample]
    pid: int
    node_id: str
    request_s: float
    kv_token_s: float
    rates_age_s: float
    num_promised_tokens: int
    num_computed_tokens: int
    def __init__(self, state: _Optional[str] = ..., num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., num_transferring: _Optional[int] = ..., num_waiting_uncached_tokens: _Optional[int] = ..., blocks: _Optional[_Union[BlockCounts, _Mapping]] = ..., prefill_tokens_per_s: _Optional[float] = ..., step_s: _Optional[float] = ..., heartbeat_age_s: _Optional[float] = ..., predicted_step_s: _Optional[float] = ..., links: _Optional[_Iterable[_Union[LinkStatus, _Mapping]]] = ..., metrics: _Optional[_Iterable[_Union[MetricSample, _Mapping]]] = ..., pid: _Optional[int] = ..., node_id: _Optional[str] = ..., request_s: _Optional[float] = ..., kv_token_s: _Optional[float] = ..., rates_age_s: _Optional[float] = ..., num_promised_tokens: _Optional[int] = ..., num_computed_tokens: _Optional[int] = ...) -> None: ...
