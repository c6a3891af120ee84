from relevo.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SetPeersRequest(_message.Message):
    __slots__ = ("ingress_id", "prefill_workers")
    INGRESS_ID_FIELD_NUMBER: _ClassVar[int]
    PREFILL_WORKERS_FIELD_NUMBER: _ClassVar[int]
    ingress_id: str
    prefill_workers: _containers.RepeatedCompositeFieldContainer[_common_pb2.Peer]
    def __init__(self, ingress_id: _Optional[str] = ..., prefill_workers: _Optional[_Iterable[_Union[_common_pb2.Peer, _Mapping]]] = ...) -> None: ...

class SetPeersResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DecodeRequest(_message.Message):
    __slots__ = ("request", "transfer_id", "epoch", "prefill_worker", "decode_incarnation")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PREFILL_WORKER_FIELD_NUMBER: _ClassVar[int]
    DECODE_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    request: _common_pb2.EngineRequest
    transfer_id: int
    epoch: int
    prefill_worker: _common_pb2.WorkerRef
    decode_incarnation: int
    def __init__(self, request: _Optional[_Union[_common_pb2.EngineRequest, _Mapping]] = ..., transfer_id: _Optional[int] = ..., epoch: _Optional[int] = ..., prefill_worker: _Optional[_Union[_common_pb2.WorkerRef, _Mapping]] = ..., decode_incarnation: _Optional[int] = ...) -> None: ...

class DecodeResponse(_message.Message):
    __slots__ = ("admitted", "tokens", "timings", "num_cached_tokens", "kv_transfer_bytes")
    class Admitted(_message.Message):
        __slots__ = ()
        def __init__(self) -> None: ...
    ADMITTED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_TRANSFER_BYTES_FIELD_NUMBER: _ClassVar[int]
    admitted: DecodeResponse.Admitted
    tokens: _common_pb2.Tokens
    timings: _common_pb2.WorkerTimings
    num_cached_tokens: int
    kv_transfer_bytes: int
    def __init__(self, admitted: _Optional[_Union[DecodeResponse.Admitted, _Mapping]] = ..., tokens: _Optional[_Union[_common_pb2.Tokens, _Mapping]] = ..., timings: _Optional[_Union[_common_pb2.WorkerTimings, _Mapping]] = ..., num_cached_tokens: _Optional[int] = ..., kv_transfer_bytes: _Optional[int] = ...) -> None: ...

class CancelChoicesRequest(_message.Message):
    __slots__ = ("transfer_id", "epoch", "choice_indexes")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    CHOICE_INDEXES_FIELD_NUMBER: _ClassVar[int]
    transfer_id: int
    epoch: int
    choice_indexes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, transfer_id: _Optional[int] = ..., epoch: _Optional[int] = ..., choice_indexes: _Optional[_Iterable[int]] = ...) -> None: ...

class CancelChoicesResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
