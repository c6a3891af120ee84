from relevo.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FetchVerdict(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FETCH_VERDICT_UNSPECIFIED: _ClassVar[FetchVerdict]
    FETCH_VERDICT_GRANTED: _ClassVar[FetchVerdict]
    FETCH_VERDICT_NOT_YET: _ClassVar[FetchVerdict]
    FETCH_VERDICT_GONE: _ClassVar[FetchVerdict]
FETCH_VERDICT_UNSPECIFIED: FetchVerdict
FETCH_VERDICT_GRANTED: FetchVerdict
FETCH_VERDICT_NOT_YET: FetchVerdict
FETCH_VERDICT_GONE: FetchVerdict

class StoreEntry(_message.Message):
    __slots__ = ("key", "value")
    KEY_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    key: str
    value: bytes
    def __init__(self, key: _Optional[str] = ..., value: _Optional[bytes] = ...) -> None: ...

class LinkEnd(_message.Message):
    __slots__ = ("backend", "device", "boot_id", "network_namespace", "user_id", "interface", "no_shared_memory")
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    NETWORK_NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    USER_ID_FIELD_NUMBER: _ClassVar[int]
    INTERFACE_FIELD_NUMBER: _ClassVar[int]
    NO_SHARED_MEMORY_FIELD_NUMBER: _ClassVar[int]
    backend: str
    device: str
    boot_id: str
    network_namespace: str
    user_id: int
    interface: str
    no_shared_memory: str
    def __init__(self, backend: _Optional[str] = ..., device: _Optional[str] = ..., boot_id: _Optional[str] = ..., network_namespace: _Optional[str] = ..., user_id: _Optional[int] = ..., interface: _Optional[str] = ..., no_shared_memory: _Optional[str] = ...) -> None: ...

class OpenLinkRequest(_message.Message):
    __slots__ = ("open", "store_entry", "alive")
    class Alive(_message.Message):
        __slots__ = ()
        def __init__(self) -> None: ...
    class Open(_message.Message):
        __slots__ = ("decode_worker", "generation", "layout", "prefill_incarnation", "end")
        DECODE_WORKER_FIELD_NUMBER: _ClassVar[int]
        GENERATION_FIELD_NUMBER: _ClassVar[int]
        LAYOUT_FIELD_NUMBER: _ClassVar[int]
        PREFILL_INCARNATION_FIELD_NUMBER: _ClassVar[int]
        END_FIELD_NUMBER: _ClassVar[int]
        decode_worker: _common_pb2.WorkerRef
        generation: int
        layout: _common_pb2.KVLayout
        prefill_incarnation: int
        end: LinkEnd
        def __init__(self, decode_worker: _Optional[_Union[_common_pb2.WorkerRef, _Mapping]] = ..., generation: _Optional[int] = ..., layout: _Optional[_Union[_common_pb2.KVLayout, _Mapping]] = ..., prefill_incarnation: _Optional[int] = ..., end: _Optional[_Union[LinkEnd, _Mapping]] = ...) -> None: ...
    OPEN_FIELD_NUMBER: _ClassVar[int]
    STORE_ENTRY_FIELD_NUMBER: _ClassVar[int]
    ALIVE_FIELD_NUMBER: _ClassVar[int]
    open: OpenLinkRequest.Open
    store_entry: StoreEntry
    alive: OpenLinkRequest.Alive
    def __init__(self, open: _Optional[_Union[OpenLinkRequest.Open, _Mapping]] = ..., store_entry: _Optional[_Union[StoreEntry, _Mapping]] = ..., alive: _Optional[_Union[OpenLinkRequest.Alive, _Mapping]] = ...) -> None: ...

class OpenLinkResponse(_message.Message):
    __slots__ = ("accepted", "incompatible", "store_entry", "ready", "alive")
    class Accepted(_message.Message):
        __slots__ = ("layout", "backend", "reason")
        LAYOUT_FIELD_NUMBER: _ClassVar[int]
        BACKEND_FIELD_NUMBER: _ClassVar[int]
        REASON_FIELD_NUMBER: _ClassVar[int]
        layout: _common_pb2.KVLayout
        backend: str
        reason: str
        def __init__(self, layout: _Optional[_Union[_common_pb2.KVLayout, _Mapping]] = ..., backend: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...
    class Incompatible(_message.Message):
        __slots__ = ("reason",)
        REASON_FIELD_NUMBER: _ClassVar[int]
        reason: str
        def __init__(self, reason: _Optional[str] = ...) -> None: ...
    class Ready(_message.Message):
        __slots__ = ()
        def __init__(self) -> None: ...
    class Alive(_message.Message):
        __slots__ = ()
        def __init__(self) -> None: ...
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    INCOMPATIBLE_FIELD_NUMBER: _ClassVar[int]
    STORE_ENTRY_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    ALIVE_FIELD_NUMBER: _ClassVar[int]
    accepted: OpenLinkResponse.Accepted
    incompatible: OpenLinkResponse.Incompatible
    store_entry: StoreEntry
    ready: OpenLinkResponse.Ready
    alive: OpenLinkResponse.Alive
    def __init__(self, accepted: _Optional[_Union[OpenLinkResponse.Accepted, _Mapping]] = ..., incompatible: _Optional[_Union[OpenLinkResponse.Incompatible, _Mapping]] = ..., store_entry: _Optional[_Union[StoreEntry, _Mapping]] = ..., ready: _Optional[_Union[OpenLinkResponse.Ready, _Mapping]] = ..., alive: _Optional[_Union[OpenLinkResponse.Alive, _Mapping]] = ...) -> None: ...

class PrefillRequest(_message.Message):
    __slots__ = ("request", "transfer_id", "epoch", "decode_worker", "prefill_incarnation")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    DECODE_WORKER_FIELD_NUMBER: _ClassVar[int]
    PREFILL_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    request: _common_pb2.EngineRequest
    transfer_id: int
    epoch: int
    decode_worker: _common_pb2.WorkerRef
    prefill_incarnation: int
    def __init__(self, request: _Optional[_Union[_common_pb2.EngineRequest, _Mapping]] = ..., transfer_id: _Optional[int] = ..., epoch: _Optional[int] = ..., decode_worker: _Optional[_Union[_common_pb2.WorkerRef, _Mapping]] = ..., prefill_incarnation: _Optional[int] = ...) -> None: ...

class PrefillResponse(_message.Message):
    __slots__ = ("progress", "tokens", "timings")
    class Progress(_message.Message):
        __slots__ = ("num_computed_tokens", "num_cached_tokens")
        NUM_COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
        NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
        num_computed_tokens: int
        num_cached_tokens: int
        def __init__(self, num_computed_tokens: _Optional[int] = ..., num_cached_tokens: _Optional[int] = ...) -> None: ...
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    progress: PrefillResponse.Progress
    tokens: _common_pb2.Tokens
    timings: _common_pb2.WorkerTimings
    def __init__(self, progress: _Optional[_Union[PrefillResponse.Progress, _Mapping]] = ..., tokens: _Optional[_Union[_common_pb2.Tokens, _Mapping]] = ..., timings: _Optional[_Union[_common_pb2.WorkerTimings, _Mapping]] = ...) -> None: ...

class TransferRequest(_message.Message):
    __slots__ = ("transfer_id", "epoch", "decode_worker")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    DECODE_WORKER_FIELD_NUMBER: _ClassVar[int]
    transfer_id: int
    epoch: int
    decode_worker: _common_pb2.WorkerRef
    def __init__(self, transfer_id: _Optional[int] = ..., epoch: _Optional[int] = ..., decode_worker: _Optional[_Union[_common_pb2.WorkerRef, _Mapping]] = ...) -> None: ...

class TransferResponse(_message.Message):
    __slots__ = ("offer", "commit")
    class Offer(_message.Message):
        __slots__ = ("num_tokens",)
        NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
        num_tokens: int
        def __init__(self, num_tokens: _Optional[int] = ...) -> None: ...
    class Choice(_message.Message):
        __slots__ = ("index", "token_id", "finish_reason", "logprobs")
        INDEX_FIELD_NUMBER: _ClassVar[int]
        TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
        FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
        LOGPROBS_FIELD_NUMBER: _ClassVar[int]
        index: int
        token_id: int
        finish_reason: _common_pb2.FinishReason
        logprobs: _common_pb2.Logprobs
        def __init__(self, index: _Optional[int] = ..., token_id: _Optional[int] = ..., finish_reason: _Optional[_Union[_common_pb2.FinishReason, str]] = ..., logprobs: _Optional[_Union[_common_pb2.Logprobs, _Mapping]] = ...) -> None: ...
    class Commit(_message.Message):
        __slots__ = ("num_tokens", "choices", "digests")
        NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
        CHOICES_FIELD_NUMBER: _ClassVar[int]
        DIGESTS_FIELD_NUMBER: _ClassVar[int]
        num_tokens: int
        choices: _containers.RepeatedCompositeFieldContainer[TransferResponse.Choice]
        digests: _containers.RepeatedCompositeFieldContainer[ChunkDigest]
        def __init__(self, num_tokens: _Optional[int] = ..., choices: _Optional[_Iterable[_Union[TransferResponse.Choice, _Mapping]]] = ..., digests: _Optional[_Iterable[_Union[ChunkDigest, _Mapping]]] = ...) -> None: ...
    OFFER_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    offer: TransferResponse.Offer
    commit: TransferResponse.Commit
    def __init__(self, offer: _Optional[_Union[TransferResponse.Offer, _Mapping]] = ..., commit: _Optional[_Union[TransferResponse.Commit, _Mapping]] = ...) -> None: ...

class ChunkDigest(_message.Message):
    __slots__ = ("token_start", "token_end", "digest")
    TOKEN_START_FIELD_NUMBER: _ClassVar[int]
    TOKEN_END_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    token_start: int
    token_end: int
    digest: bytes
    def __init__(self, token_start: _Optional[int] = ..., token_end: _Optional[int] = ..., digest: _Optional[bytes] = ...) -> None: ...

class FetchRequest(_message.Message):
    __slots__ = ("transfer_id", "epoch", "decode_worker", "generation", "ticket", "token_start", "token_end", "with_digest")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    DECODE_WORKER_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    TOKEN_START_FIELD_NUMBER: _ClassVar[int]
    TOKEN_END_FIELD_NUMBER: _ClassVar[int]
    WITH_DIGEST_FIELD_NUMBER: _ClassVar[int]
    transfer_id: int
    epoch: int
    decode_worker: _common_pb2.WorkerRef
    generation: int
    ticket: int
    token_start: int
    token_end: int
    with_digest: bool
    def __init__(self, transfer_id: _Optional[int] = ..., epoch: _Optional[int] = ..., decode_worker: _Optional[_Union[_common_pb2.WorkerRef, _Mapping]] = ..., generation: _Optional[int] = ..., ticket: _Optional[int] = ..., token_start: _Optional[int] = ..., token_end: _Optional[int] = ..., with_digest: _Optional[bool] = ...) -> None: ...

class FetchResponse(_message.Message):
    __slots__ = ("verdict", "digest", "lent_block_ids")
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    LENT_BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    verdict: FetchVerdict
    digest: bytes
    lent_block_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, verdict: _Optional[_Union[FetchVerdict, str]] = ..., digest: _Optional[bytes] = ..., lent_block_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("transfer_id", "epoch")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    transfer_id: int
    epoch: int
    def __init__(self, transfer_id: _Optional[int] = ..., epoch: _Optional[int] = ...) -> None: ...

class ReleaseResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
