"""The bytes of a slot of the engine, and of the adapters in it."""

from adapters.model.base_model import MLP_MODULES, BaseModel
from adapters.model.serving import EngineDtype, engine_modules

ITEM_BYTES: dict[EngineDtype, int] = {"float32": 4, "bfloat16": 2, "float16": 2}


def slot_bytes(
    base: BaseModel, max_rank: int, target_modules: tuple[str, ...], dtype: EngineDtype, max_expert_rank: int = 0
) -> int:
    """Bytes of the buffers of one slot without tensor parallelism.

    SGLang allocates A [max_rank, in] and B [out, max_rank] for each target projection of every layer, siblings of
    stacked projections included, whatever adapter is in the slot (`LoRAMemoryPool.get_lora_A_shape`). ReFT adds A and B
    [max_rank, hidden] and b [max_rank] for every layer (`engine.adapter_slots.reft.ReftPool`). Tensor-parallel ranks
    share SGLang's buffers, but each has all of ReFT's. For a mixture of experts, slots have attention's projections
    and, with a `max_expert_rank`, all projections of all experts.
    """
    lora = lora_bytes(base, max_rank, target_modules, dtype) + expert_bytes(base, max_expert_rank, dtype)
    return lora + reft_bytes(base, max_rank, dtype)


def lora_bytes(base: BaseModel, rank: int, target_modules: tuple[str, ...], dtype: EngineDtype) -> int:
    """Bytes of a LoRA's factors in the form that engines load, with the siblings of stacked projections."""
    shapes = [base.shape_of(module) for module in engine_modules(set(base.slot_modules(target_modules)))]
    return base.num_layers * rank * sum(size_in + size_out for size_out, size_in in shapes) * ITEM_BYTES[dtype]


def expert_bytes(base: BaseModel, rank: int, dtype: EngineDtype) -> int:
    """Bytes of LoRA on gate, up and down of all experts of all layers; 0 for a base model without such."""
    if (experts := base.adapted_experts) is None:
        return 0
    width = sum(sum(base.expert_shape_of(module)) for module in MLP_MODULES)
    return len(experts.layers) * experts.count * rank * width * ITEM_BYTES[dtype]


def reft_bytes(base: BaseModel, rank: int, dtype: EngineDtype) -> int:
    """Bytes of a ReFT's A, B [rank, hidden] and b [rank] for every layer."""
    return base.num_layers * rank * (2 * base.hidden + 1) * ITEM_BYTES[dtype]
