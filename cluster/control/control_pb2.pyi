from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_PREFILL: _ClassVar[Role]
    ROLE_DECODE: _ClassVar[Role]
    ROLE_UNIFIED: _ClassVar[Role]

class EngineState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ENGINE_STATE_UNSPECIFIED: _ClassVar[EngineState]
    ENGINE_STATE_STARTING: _ClassVar[EngineState]
    ENGINE_STATE_UP: _ClassVar[EngineState]
    ENGINE_STATE_DOWN: _ClassVar[EngineState]
    ENGINE_STATE_STOPPED: _ClassVar[EngineState]
ROLE_UNSPECIFIED: Role
ROLE_PREFILL: Role
ROLE_DECODE: Role
ROLE_UNIFIED: Role
ENGINE_STATE_UNSPECIFIED: EngineState
ENGINE_STATE_STARTING: EngineState
ENGINE_STATE_UP: EngineState
ENGINE_STATE_DOWN: EngineState
ENGINE_STATE_STOPPED: EngineState

class DescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WorkerDescription(_message.Message):
    __slots__ = ("name", "role", "engine_url", "kv_host", "kv_bootstrap_port", "model", "engine_version", "hooks", "max_adapter_rank", "target_modules", "domain", "agent_id", "tensor_parallel", "engine_key", "kv_page_tokens", "base_weights", "dtype", "metrics_port")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    ENGINE_URL_FIELD_NUMBER: _ClassVar[int]
    KV_HOST_FIELD_NUMBER: _ClassVar[int]
    KV_BOOTSTRAP_PORT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ENGINE_VERSION_FIELD_NUMBER: _ClassVar[int]
    HOOKS_FIELD_NUMBER: _ClassVar[int]
    MAX_ADAPTER_RANK_FIELD_NUMBER: _ClassVar[int]
    TARGET_MODULES_FIELD_NUMBER: _ClassVar[int]
    DOMAIN_FIELD_NUMBER: _ClassVar[int]
    AGENT_ID_FIELD_NUMBER: _ClassVar[int]
    TENSOR_PARALLEL_FIELD_NUMBER: _ClassVar[int]
    ENGINE_KEY_FIELD_NUMBER: _ClassVar[int]
    KV_PAGE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BASE_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    METRICS_PORT_FIELD_NUMBER: _ClassVar[int]
    name: str
    role: Role
    engine_url: str
    kv_host: str
    kv_bootstrap_port: int
    model: str
    engine_version: str
    hooks: _containers.RepeatedScalarFieldContainer[str]
    max_adapter_rank: int
    target_modules: _containers.RepeatedScalarFieldContainer[str]
    domain: str
    agent_id: str
    tensor_parallel: int
    engine_key: str
    kv_page_tokens: int
    base_weights: str
    dtype: str
    metrics_port: int
    def __init__(self, name: _Optional[str] = ..., role: _Optional[_Union[Role, str]] = ..., engine_url: _Optional[str] = ..., kv_host: _Optional[str] = ..., kv_bootstrap_port: _Optional[int] = ..., model: _Optional[str] = ..., engine_version: _Optional[str] = ..., hooks: _Optional[_Iterable[str]] = ..., max_adapter_rank: _Optional[int] = ..., target_modules: _Optional[_Iterable[str]] = ..., domain: _Optional[str] = ..., agent_id: _Optional[str] = ..., tensor_parallel: _Optional[int] = ..., engine_key: _Optional[str] = ..., kv_page_tokens: _Optional[int] = ..., base_weights: _Optional[str] = ..., dtype: _Optional[str] = ..., metrics_port: _Optional[int] = ...) -> None: ...

class WatchStateRequest(_message.Message):
    __slots__ = ("heartbeat_s", "places_requests")
    HEARTBEAT_S_FIELD_NUMBER: _ClassVar[int]
    PLACES_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    heartbeat_s: float
    places_requests: bool
    def __init__(self, heartbeat_s: _Optional[float] = ..., places_requests: _Optional[bool] = ...) -> None: ...

class WorkerState(_message.Message):
    __slots__ = ("incarnation", "engine_state", "ready", "draining", "load", "warm_pairs", "residency", "reason", "not_warm_with", "hung", "progress", "routers", "gives_back", "leaves_role")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ENGINE_STATE_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    WARM_PAIRS_FIELD_NUMBER: _ClassVar[int]
    RESIDENCY_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    NOT_WARM_WITH_FIELD_NUMBER: _ClassVar[int]
    HUNG_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    ROUTERS_FIELD_NUMBER: _ClassVar[int]
    GIVES_BACK_FIELD_NUMBER: _ClassVar[int]
    LEAVES_ROLE_FIELD_NUMBER: _ClassVar[int]
    incarnation: str
    engine_state: EngineState
    ready: bool
    draining: bool
    load: Load
    warm_pairs: _containers.RepeatedCompositeFieldContainer[WarmPair]
    residency: ResidencyDelta
    reason: str
    not_warm_with: _containers.RepeatedScalarFieldContainer[str]
    hung: bool
    progress: int
    routers: int
    gives_back: bool
    leaves_role: bool
    def __init__(self, incarnation: _Optional[str] = ..., engine_state: _Optional[_Union[EngineState, str]] = ..., ready: _Optional[bool] = ..., draining: _Optional[bool] = ..., load: _Optional[_Union[Load, _Mapping]] = ..., warm_pairs: _Optional[_Iterable[_Union[WarmPair, _Mapping]]] = ..., residency: _Optional[_Union[ResidencyDelta, _Mapping]] = ..., reason: _Optional[str] = ..., not_warm_with: _Optional[_Iterable[str]] = ..., hung: _Optional[bool] = ..., progress: _Optional[int] = ..., routers: _Optional[int] = ..., gives_back: _Optional[bool] = ..., leaves_role: _Optional[bool] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("running_requests", "queued_requests", "used_kv_tokens", "max_kv_tokens", "awaiting_room_requests", "awaiting_kv_requests", "max_running_requests", "active_kv_tokens", "read_tokens", "reading_us", "decode_steps", "decode_us")
    RUNNING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    USED_KV_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_KV_TOKENS_FIELD_NUMBER: _ClassVar[int]
    AWAITING_ROOM_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    AWAITING_KV_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    MAX_RUNNING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_KV_TOKENS_FIELD_NUMBER: _ClassVar[int]
    READ_TOKENS_FIELD_NUMBER: _ClassVar[int]
    READING_US_FIELD_NUMBER: _ClassVar[int]
    DECODE_STEPS_FIELD_NUMBER: _ClassVar[int]
    DECODE_US_FIELD_NUMBER: _ClassVar[int]
    running_requests: int
    queued_requests: int
    used_kv_tokens: int
    max_kv_tokens: int
    awaiting_room_requests: int
    awaiting_kv_requests: int
    max_running_requests: int
    active_kv_tokens: int
    read_tokens: int
    reading_us: int
    decode_steps: int
    decode_us: int
    def __init__(self, running_requests: _Optional[int] = ..., queued_requests: _Optional[int] = ..., used_kv_tokens: _Optional[int] = ..., max_kv_tokens: _Optional[int] = ..., awaiting_room_requests: _Optional[int] = ..., awaiting_kv_requests: _Optional[int] = ..., max_running_requests: _Optional[int] = ..., active_kv_tokens: _Optional[int] = ..., read_tokens: _Optional[int] = ..., reading_us: _Optional[int] = ..., decode_steps: _Optional[int] = ..., decode_us: _Optional[int] = ...) -> None: ...

class WarmPair(_message.Message):
    __slots__ = ("decode_name", "decode_incarnation")
    DECODE_NAME_FIELD_NUMBER: _ClassVar[int]
    DECODE_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    decode_name: str
    decode_incarnation: str
    def __init__(self, decode_name: _Optional[str] = ..., decode_incarnation: _Optional[str] = ...) -> None: ...

class ResidencyDelta(_message.Message):
    __slots__ = ("snapshot", "resident", "evicted", "on_disk", "off_disk", "in_memory_only", "not_in_memory_only", "kept", "not_kept")
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_FIELD_NUMBER: _ClassVar[int]
    EVICTED_FIELD_NUMBER: _ClassVar[int]
    ON_DISK_FIELD_NUMBER: _ClassVar[int]
    OFF_DISK_FIELD_NUMBER: _ClassVar[int]
    IN_MEMORY_ONLY_FIELD_NUMBER: _ClassVar[int]
    NOT_IN_MEMORY_ONLY_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    NOT_KEPT_FIELD_NUMBER: _ClassVar[int]
    snapshot: bool
    resident: _containers.RepeatedScalarFieldContainer[str]
    evicted: _containers.RepeatedScalarFieldContainer[str]
    on_disk: _containers.RepeatedScalarFieldContainer[str]
    off_disk: _containers.RepeatedScalarFieldContainer[str]
    in_memory_only: _containers.RepeatedScalarFieldContainer[str]
    not_in_memory_only: _containers.RepeatedScalarFieldContainer[str]
    kept: _containers.RepeatedScalarFieldContainer[str]
    not_kept: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, snapshot: _Optional[bool] = ..., resident: _Optional[_Iterable[str]] = ..., evicted: _Optional[_Iterable[str]] = ..., on_disk: _Optional[_Iterable[str]] = ..., off_disk: _Optional[_Iterable[str]] = ..., in_memory_only: _Optional[_Iterable[str]] = ..., not_in_memory_only: _Optional[_Iterable[str]] = ..., kept: _Optional[_Iterable[str]] = ..., not_kept: _Optional[_Iterable[str]] = ...) -> None: ...

class EnsureAdapterRequest(_message.Message):
    __slots__ = ("revision_id", "deadline_s", "prewarm", "not_in_engine", "tenant")
    REVISION_ID_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    PREWARM_FIELD_NUMBER: _ClassVar[int]
    NOT_IN_ENGINE_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    revision_id: str
    deadline_s: float
    prewarm: bool
    not_in_engine: bool
    tenant: str
    def __init__(self, revision_id: _Optional[str] = ..., deadline_s: _Optional[float] = ..., prewarm: _Optional[bool] = ..., not_in_engine: _Optional[bool] = ..., tenant: _Optional[str] = ...) -> None: ...

class EnsureAdapterResponse(_message.Message):
    __slots__ = ("load_s",)
    LOAD_S_FIELD_NUMBER: _ClassVar[int]
    load_s: float
    def __init__(self, load_s: _Optional[float] = ...) -> None: ...

class PinAdapterRequest(_message.Message):
    __slots__ = ("revision_id", "pinned", "deadline_s")
    REVISION_ID_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    revision_id: str
    pinned: bool
    deadline_s: float
    def __init__(self, revision_id: _Optional[str] = ..., pinned: _Optional[bool] = ..., deadline_s: _Optional[float] = ...) -> None: ...

class PinAdapterResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PutAdapterRequest(_message.Message):
    __slots__ = ("begin", "chunk")
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    begin: PutAdapterBegin
    chunk: bytes
    def __init__(self, begin: _Optional[_Union[PutAdapterBegin, _Mapping]] = ..., chunk: _Optional[bytes] = ...) -> None: ...

class PutAdapterBegin(_message.Message):
    __slots__ = ("revision_id", "content_bytes", "content_sha256", "deadline_s", "signature", "path")
    REVISION_ID_FIELD_NUMBER: _ClassVar[int]
    CONTENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    CONTENT_SHA256_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    revision_id: str
    content_bytes: int
    content_sha256: str
    deadline_s: float
    signature: bytes
    path: str
    def __init__(self, revision_id: _Optional[str] = ..., content_bytes: _Optional[int] = ..., content_sha256: _Optional[str] = ..., deadline_s: _Optional[float] = ..., signature: _Optional[bytes] = ..., path: _Optional[str] = ...) -> None: ...

class PutAdapterResponse(_message.Message):
    __slots__ = ("was_pinned",)
    WAS_PINNED_FIELD_NUMBER: _ClassVar[int]
    was_pinned: bool
    def __init__(self, was_pinned: _Optional[bool] = ...) -> None: ...

class EvictAdapterRequest(_message.Message):
    __slots__ = ("revision_id", "from_disk")
    REVISION_ID_FIELD_NUMBER: _ClassVar[int]
    FROM_DISK_FIELD_NUMBER: _ClassVar[int]
    revision_id: str
    from_disk: bool
    def __init__(self, revision_id: _Optional[str] = ..., from_disk: _Optional[bool] = ...) -> None: ...

class EvictAdapterResponse(_message.Message):
    __slots__ = ("evicted",)
    EVICTED_FIELD_NUMBER: _ClassVar[int]
    evicted: bool
    def __init__(self, evicted: _Optional[bool] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("deadline_s",)
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    deadline_s: float
    def __init__(self, deadline_s: _Optional[float] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("idle",)
    IDLE_FIELD_NUMBER: _ClassVar[int]
    idle: bool
    def __init__(self, idle: _Optional[bool] = ...) -> None: ...

class ChangeRoleRequest(_message.Message):
    __slots__ = ("role", "deadline_s", "give_back_after_s", "even_last")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    GIVE_BACK_AFTER_S_FIELD_NUMBER: _ClassVar[int]
    EVEN_LAST_FIELD_NUMBER: _ClassVar[int]
    role: Role
    deadline_s: float
    give_back_after_s: float
    even_last: bool
    def __init__(self, role: _Optional[_Union[Role, str]] = ..., deadline_s: _Optional[float] = ..., give_back_after_s: _Optional[float] = ..., even_last: _Optional[bool] = ...) -> None: ...

class ChangeRoleResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class UndrainRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class UndrainResponse(_message.Message):
    __slots__ = ("was_draining",)
    WAS_DRAINING_FIELD_NUMBER: _ClassVar[int]
    was_draining: bool
    def __init__(self, was_draining: _Optional[bool] = ...) -> None: ...
