"""Computes from a model's sizes how many KV tokens and adapters fit in memory. Pure arithmetic."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from adapters.errors import BaseModelInvalid
from adapters.model.base_model import MODULES, BaseModel, text_fields
from adapters.model.footprint import ITEM_BYTES, slot_bytes
from adapters.model.serving import EngineDtype
from cluster.host_memory import gib
from engine.base_models import check_tensor_parallel
from engine.errors import BaseModelNotRun

# Of a GPU's memory, for weights, adapter slots and KV. SGLang's own default leaves about as much for activations, CUDA
# graphs and the communication between ranks.
GPU_SHARE = 0.85
CPU_SHARE = 0.5  # of the free memory of a host without GPUs, for all engines together
MIN_TOKENS = 4096  # of KV, below which a worker is of no use
_MAX_HEADER_BYTES = 100 * 1024**2
INDEX_NAME = "model.safetensors.index.json"
_MAX_INDEX_BYTES = 64 * 1024**2
_DTYPES: dict[str, EngineDtype] = {"float32": "float32", "bfloat16": "bfloat16", "float16": "float16"}
_STORED_BYTES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2}
_VISION_TOWER = "model.visual."  # which engines do not load
# Of a weight of the layers, by the quantisation that config.json names; the embeddings keep the serving dtype.
_QUANTISED_BYTES = {"fp8": 1, "fbgemm_fp8": 1}
_MXFP4_BYTES = 17 / 32  # four bits for each weight, and a byte for the scale of 32
_SERVED = ("F64", "F32", "F16", "BF16")  # converted to the serving dtype


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """The memory that a model takes, without tensor parallelism."""

    base: BaseModel
    dtype: EngineDtype  # in which it is served
    layer_item_bytes: float  # of a weight of the layers
    expert_item_bytes: float  # of one of their experts
    weight_bytes: int
    weights_from: str  # where that number comes from, in words
    max_context: int | None  # tokens; None: config.json does not say

    @classmethod
    def read(cls, model: Path, dtype: EngineDtype | None = None) -> Self:
        """Read config.json and the headers of the weights. Raises BaseModelInvalid.

        `dtype`: None for the checkpoint's. Quantised weights are as large as they are stored.
        """
        base = BaseModel.read(model)
        path = model / "config.json"
        whole = json.loads(path.read_bytes())
        config = whole | text_fields(whole, path)
        stored = str(config.get("dtype") or config.get("torch_dtype")).removeprefix("torch.")
        dtype = dtype or _DTYPES.get(stored, "bfloat16")
        method = _quantisation(config)
        item_bytes = _QUANTISED_BYTES.get(method, ITEM_BYTES[dtype])
        expert_item_bytes = _MXFP4_BYTES if base.has_mxfp4 else item_bytes
        files = weight_files(model)
        if files:
            weight_bytes, weights_from = sum(_tensor_bytes(file, dtype) for file in files), "its safetensors files"
        else:
            embeddings = 2 * base.vocabulary * base.hidden * ITEM_BYTES[dtype]  # as if they were not tied
            weight_bytes = embeddings + _layer_bytes(base, item_bytes, expert_item_bytes)
            weights_from = "config.json, as there are no weights"
            if method not in ("", "mxfp4", *_QUANTISED_BYTES):
                weights_from += f", and without its quantisation {method!r}, whose sizes are not known"
        context = config.get("max_position_embeddings")
        max_context = context if isinstance(context, int) else None
        return cls(base, dtype, item_bytes, expert_item_bytes, weight_bytes, weights_from, max_context)

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of one token in all layers."""
        return 2 * self.base.num_layers * self.base.kv_heads * self.base.head_dim * ITEM_BYTES[self.dtype]

    def kv_bytes_per_token_and_rank(self, tensor_parallel: int) -> int:
        """One rank's part of it. Ranks beyond the number of KV heads keep copies."""
        return self.kv_bytes_per_token // min(tensor_parallel, self.base.kv_heads)

    def adapter_bytes(self, rank: int) -> int:
        """An adapter of this rank on every projection that engines adapt, in host memory or in a slot."""
        return slot_bytes(self.base, rank, MODULES, self.dtype)


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """The memory of one engine's rank: a GPU's, or this engine's share of a host's."""

    usable_bytes: int
    weight_bytes: int
    slot_bytes: int  # of all adapter slots; 0 on decode engines
    kv_bytes_per_token: int

    @property
    def max_tokens(self) -> int:
        """Tokens of KV that fit beside the rest; negative if the rest does not fit."""
        return (self.usable_bytes - self.weight_bytes - self.slot_bytes) // self.kv_bytes_per_token

    @property
    def is_enough(self) -> bool:
        return self.max_tokens >= MIN_TOKENS

    @property
    def arithmetic(self) -> str:
        """The arithmetic behind `max_tokens`, as text."""
        slots = f" - {gib(self.slot_bytes)} of adapter slots" if self.slot_bytes else ""
        return (
            f"({gib(self.usable_bytes)} usable - {gib(self.weight_bytes)} of weights{slots}) / "
            f"{self.kv_bytes_per_token} bytes of KV per token = {self.max_tokens} tokens"
        )


def engine_memory(sizes: ModelSizes, usable_bytes: int, tensor_parallel: int, adapter_slot_bytes: int) -> EngineMemory:
    """One rank's memory. Slots are counted in full, because ranks split only some of their buffers."""
    return EngineMemory(
        usable_bytes,
        sizes.weight_bytes // tensor_parallel,
        adapter_slot_bytes,
        sizes.kv_bytes_per_token_and_rank(tensor_parallel),
    )


def can_divide(base: BaseModel, tensor_parallel: int) -> bool:
    """Whether engines can divide the model among so many GPUs."""
    try:
        check_tensor_parallel(tensor_parallel, base)
    except BaseModelNotRun:
        return False
    return True


def weight_files(model: Path) -> list[Path]:
    """The safetensors files that engines load: those of the index, else all but Mistral's own `consolidated` ones."""
    index = model / INDEX_NAME
    if index.exists():
        try:
            with index.open("rb") as file:
                names = set(json.loads(file.read(_MAX_INDEX_BYTES))["weight_map"].values())
            return [model / Path(name).name for name in sorted(names)]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise BaseModelInvalid(f"{index} cannot be read: {error!r}") from error
    return sorted(path for path in model.glob("*.safetensors") if not path.name.startswith("consolidated"))


def _tensor_bytes(path: Path, dtype: EngineDtype) -> int:
    """Bytes of a file's tensors in the serving dtype; quantised ones as they are stored. Raises BaseModelInvalid."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > _MAX_HEADER_BYTES:
                raise ValueError(f"its header claims {length} bytes")
            header: dict[str, Any] = json.loads(file.read(length))
        header.pop("__metadata__", None)
        return sum(
            math.prod(tensor["shape"])
            * (ITEM_BYTES[dtype] if tensor["dtype"] in _SERVED else _STORED_BYTES.get(tensor["dtype"], 1))
            for name, tensor in header.items()
            if not name.startswith(_VISION_TOWER)
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BaseModelInvalid(f"{path} is not a safetensors file: {error}") from error


def _quantisation(config: dict[str, Any]) -> str:
    """Its name in config.json; empty if there is none."""
    found = config.get("quantization_config")
    return str(found.get("quant_method"))[:40] if isinstance(found, dict) else ""


def _layer_bytes(base: BaseModel, item_bytes: float, expert_item_bytes: float) -> int:
    """Bytes of the weights of all layers, norms left out."""
    others = layer_weights(base, 0)
    experts = layer_weights(base, base.experts.count) - others if base.experts else 0.0
    return int(others * item_bytes + experts * expert_item_bytes)


def layer_weights(base: BaseModel, num_experts: float) -> float:
    """Number of weights of all layers, norms left out, with so many routed experts of each mixture."""
    total = 0.0
    for layer in range(base.num_layers):
        total += sum(math.prod(base.shape_of(module)) for module in base.modules_of(layer))
        if base.experts is not None and base.has_experts(layer):
            expert = sum(math.prod(base.expert_shape_of(module)) for module in ("gate_proj", "up_proj", "down_proj"))
            total += (num_experts + base.experts.shared) * expert + base.experts.count * base.hidden
    return total
