"""The JSON requests of the Tinker API, as SDK 0.38 sends them. Unknown fields are refused by name.

A field that the SDK always sends and that changes nothing here is a field of a struct, too, and is not read.
"""

from typing import Any, Literal, TypeVar

import msgspec

from training.service.errors import Refused

T = TypeVar("T")

_NOT_OFFERED = dict.fromkeys(("topk_prompt_logprobs", "topk_sample_logprobs", "prompt_alt_tokens_k"), "leave it out")
_NOT_OFFERED["record_stability_info"] = "it is for stable_reinforce; choose loss_fn=importance_sampling, ppo or cispo"


class _Message(msgspec.Struct, forbid_unknown_fields=True):
    type: str = ""


class ClientConfig(_Message):
    sdk_version: str = ""


class CreateSession(_Message):
    tags: list[str] = []
    user_metadata: dict[str, Any] | None = None
    sdk_version: str = ""
    project_id: str | None = None
    display_name: str | None = None


class SessionHeartbeat(_Message, kw_only=True):
    session_id: str


class GetInfo(_Message, kw_only=True):
    model_id: str


class LoraConfig(msgspec.Struct, forbid_unknown_fields=True):
    rank: int
    seed: int | None = None
    train_unembed: bool = True  # ignored: it is the SDK's default, and decode runs on base weights
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["adamw"] = "adamw"


class CreateModel(_Message, kw_only=True):
    session_id: str
    model_seq_id: int
    base_model: str
    lora_config: LoraConfig
    user_metadata: dict[str, str] | None = None
    optimizer_config: OptimizerConfig = OptimizerConfig()


class LoadWeights(_Message, kw_only=True):
    """Of a model, or to create one: either `model_id` and `seq_id`, or `session_id` and `model_seq_id`."""

    path: str
    optimizer: bool
    model_id: str | None = None
    seq_id: int | None = None
    session_id: str | None = None
    model_seq_id: int | None = None
    base_model: str | None = None
    user_metadata: dict[str, str] | None = None
    optimizer_config: OptimizerConfig = OptimizerConfig()


class AdamParams(msgspec.Struct, forbid_unknown_fields=True):
    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


class OptimStep(_Message, kw_only=True):
    model_id: str
    seq_id: int
    adam_params: AdamParams


class SaveWeights(_Message, kw_only=True):
    model_id: str
    seq_id: int
    path: str
    overwrite: bool = False
    ttl_seconds: int | None = None
    user_metadata: dict[str, str] | None = None  # not kept


class SaveWeightsForSampler(_Message, kw_only=True):
    """`path` is a name. Without it, the weights are for a sampling session of their own."""

    model_id: str
    seq_id: int
    path: str | None = None
    sampling_session_seq_id: int | None = None
    kind: Literal["snapshot"] = "snapshot"
    ttl_seconds: int | None = None
    user_metadata: dict[str, str] | None = None


class CreateSamplingSession(_Message, kw_only=True):
    session_id: str
    sampling_session_seq_id: int
    base_model: str | None = None
    model_path: str | None = None


class TextChunk(msgspec.Struct, forbid_unknown_fields=True):
    tokens: list[int]
    type: Literal["encoded_text"] = "encoded_text"


class ModelInput(msgspec.Struct, forbid_unknown_fields=True):
    chunks: list[TextChunk]

    @property
    def tokens(self) -> list[int]:
        return [token for chunk in self.chunks for token in chunk.tokens]


class SamplingParams(msgspec.Struct, forbid_unknown_fields=True):
    max_tokens: int | None = None
    seed: int | None = None
    stop: str | list[str | int] | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0


class Sample(_Message, kw_only=True):
    sampling_session_id: str
    seq_id: int
    prompt: ModelInput
    sampling_params: SamplingParams
    num_samples: int = 1
    prompt_logprobs: bool | None = None
    prompt_logprobs_last_n: int | None = None
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    prompt_alt_tokens_k: int = 0
    record_stability_info: bool | None = None

    def __post_init__(self) -> None:
        for name, remedy in _NOT_OFFERED.items():  # the SDK sends them always
            if getattr(self, name):
                raise ValueError(f"{name} is not offered; {remedy}")


class RetrieveFuture(_Message, kw_only=True):
    request_id: str
    allow_metadata_only: bool = False


class CheckpointTtl(_Message, kw_only=True):
    ttl_seconds: int | None


class WeightsInfo(_Message, kw_only=True):
    tinker_path: str


class Numbered(msgspec.Struct):
    """What every command of a model has, whatever else is wrong with it."""

    model_id: str
    seq_id: int


def decoded(body: bytes, kind: type[T]) -> T:
    """Raises Refused, which names the field."""
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Refused(f"{kind.__name__}: {error}") from None
    except RecursionError:
        raise Refused(f"{kind.__name__}: nested too deeply") from None
