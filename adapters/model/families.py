"""How families of base models differ in `config.json`, names of tensors and engines, and why others are refused.

A new family takes an entry here, and one in the tests of `tests/engine/test_model_families.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass

_SAME_NAMES = {"gate_proj": "gate_proj", "up_proj": "up_proj", "down_proj": "down_proj"}


@dataclass(frozen=True, slots=True)
class Family:
    """How an architecture differs from Llama's."""

    # transformers' values of fields that config.json omits. Those of a mixture also say which fields it reads. None:
    # as many as num_attention_heads. Without a head_dim here it is hidden_size / num_attention_heads.
    defaults: Mapping[str, int | None]
    is_multimodal: bool = False  # served as text: sizes are in `text_config`, layers beside a vision tower
    # Of a mixture: the names of experts in files that keep them separate, the block and each projection.
    experts: tuple[str, Mapping[str, str]] | None = None
    # Engines adapt no MLP, whether a layer's own, of an expert or shared by all tokens. LoRA on them is refused.
    adapts_attention_only: bool = False
    has_sinks: bool = False  # in its attention: SGLang's `torch_native`, the attention of CPU engines, has none
    is_trained: bool = True  # by `prelude train`


_GEMMA3: dict[str, int | None] = {
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262_208,
    "max_position_embeddings": 131_072,
}  # fmt: skip
FAMILIES: Mapping[str, Family] = {
    "LlamaForCausalLM": Family({"num_key_value_heads": None}),
    "MistralForCausalLM": Family({"num_key_value_heads": 8}),
    "Qwen2ForCausalLM": Family({"num_key_value_heads": 32}),
    "Qwen3ForCausalLM": Family({"num_key_value_heads": 32, "head_dim": 128}),
    "Qwen3MoeForCausalLM": Family(
        {"num_key_value_heads": 4, "num_experts": 128, "moe_intermediate_size": 768, "decoder_sparse_step": 1,
         "num_experts_per_tok": 8},
        experts=("mlp", _SAME_NAMES),
    ),
    "MixtralForCausalLM": Family(
        {"num_key_value_heads": 8, "num_experts": 8, "num_experts_per_tok": 2},
        experts=("block_sparse_moe", {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}),
    ),
    "Glm4ForCausalLM": Family({"num_key_value_heads": 2, "head_dim": 128}, is_trained=False),
    "Glm4MoeForCausalLM": Family(
        {"num_key_value_heads": 8, "num_experts": 128, "moe_intermediate_size": 1408, "first_k_dense_replace": 1,
         "num_experts_per_tok": 8, "n_shared_experts": 1},
        experts=("mlp", _SAME_NAMES),
        adapts_attention_only=True,
        is_trained=False,
    ),
    "Qwen3VLForConditionalGeneration": Family(
        {"num_key_value_heads": 32, "head_dim": 128}, is_multimodal=True, is_trained=False
    ),
    "Qwen3VLMoeForConditionalGeneration": Family(
        {"num_key_value_heads": 16, "num_experts": 60, "moe_intermediate_size": 1408, "decoder_sparse_step": 1,
         "num_experts_per_tok": 4},
        is_multimodal=True,
        is_trained=False,
        experts=("mlp", _SAME_NAMES),
    ),
    "GptOssForCausalLM": Family(
        {"num_key_value_heads": 8, "head_dim": 64, "num_experts": 128, "num_experts_per_tok": 4},
        experts=("mlp", _SAME_NAMES),
        adapts_attention_only=True,
        has_sinks=True,
        is_trained=False,
    ),
    "Gemma3ForCausalLM": Family(_GEMMA3),
    "Gemma3ForConditionalGeneration": Family(_GEMMA3, is_multimodal=True, is_trained=False),
}  # fmt: skip

_REASONS = {
    "it keeps a latent in place of keys and values (MLA), and has no k_proj and v_proj for LoRA": (
        "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "DeepseekV32ForCausalLM",
        "Glm4MoeLiteForCausalLM", "GlmMoeDsaForCausalLM", "KimiK25ForConditionalGeneration", "LongcatFlashForCausalLM",
    ),
    # Not because adapters would fade: docs/decisions/0033-hybrids-are-refused-for-their-engines.md.
    "it is a hybrid: SGLang's CPU engines, on which Prelude is checked against a reference, cannot run its layers "
    "without attention": (
        "Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM", "Qwen3_5ForConditionalGeneration",
        "Qwen3_5MoeForConditionalGeneration", "KimiLinearForCausalLM", "NemotronHForCausalLM",
        "GraniteMoeHybridForCausalLM", "FalconH1ForCausalLM", "Lfm2ForCausalLM", "Lfm2MoeForCausalLM",
    ),
    "the heads of its layers have two sizes, and adapter slots have one": (
        "Gemma4ForCausalLM", "Gemma4ForConditionalGeneration", "Gemma4UnifiedForConditionalGeneration",
    ),
    "SGLang's CPU engines, on which Prelude is checked against a reference, have no attention in chunks": (
        "Llama4ForCausalLM", "Llama4ForConditionalGeneration",
    ),
}  # fmt: skip
WHY_NOT_SERVED: Mapping[str, str] = {name: reason for reason, names in _REASONS.items() for name in names}
