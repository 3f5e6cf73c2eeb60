"""Small models of every family, with random weights."""

from pathlib import Path
from typing import Any

from support.engines.mxfp4 import draw_experts, store_experts

from cluster.local.demo import make_model

SIZES = {
    "vocab_size": 640,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "dtype": "float32",
}


# Of three layers one attends to all tokens, with stretched positions; the window is shorter than tests' prompts.
GEMMA3 = {
    "head_dim": 32, "intermediate_size": 192, "tie_word_embeddings": True, "query_pre_attn_scalar": 24,
    "sliding_window": 48, "sliding_window_pattern": 2, "rope_scaling": {"rope_type": "linear", "factor": 8.0},
}  # fmt: skip

# Of three layers two have a window, and positions are stretched without rounding, as published.
GPT_OSS = {
    "head_dim": 64, "intermediate_size": 64, "num_local_experts": 8, "num_experts_per_tok": 4, "sliding_window": 48,
    "swiglu_limit": 0.5,  # published: 7, which such small numbers would not reach
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 150000.0, "factor": 8.0, "original_max_position_embeddings": 256,
        "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    },
}  # fmt: skip


def make_family(name: str, folder: Path) -> None:
    """A small model of one family with random weights, and the demo's tokenizer."""
    import torch
    import transformers
    from safetensors.torch import load_file, save_file

    make_model(folder, hidden=64, num_layers=3)
    if name == "llama":
        return
    make = {
        # 160 cannot be divided among CPU ranks.
        "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM, {"intermediate_size": 192}),
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM, {"head_dim": 32}),
        "qwen3_vl": (
            transformers.Qwen3VLConfig, transformers.Qwen3VLForConditionalGeneration,
            {"head_dim": 32, "intermediate_size": 192},
        ),
        "qwen3_vl_moe": (
            transformers.Qwen3VLMoeConfig, transformers.Qwen3VLMoeForConditionalGeneration,
            {"head_dim": 32, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48},
        ),
        # Half of each head turns with the position, by neighbouring numbers.
        "glm4": (transformers.Glm4Config, transformers.Glm4ForCausalLM, {"head_dim": 32, "intermediate_size": 192}),
        "glm4_moe": (
            transformers.Glm4MoeConfig, transformers.Glm4MoeForCausalLM,
            {"head_dim": 32, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 64,
             "use_qk_norm": True, "attention_bias": True, "routed_scaling_factor": 2.5, "num_mtp_layers": 0},
        ),
        "gemma3": (transformers.Gemma3TextConfig, transformers.Gemma3ForCausalLM, GEMMA3),
        "gemma3_vl": (transformers.Gemma3Config, transformers.Gemma3ForConditionalGeneration, GEMMA3),
        "gpt_oss": (transformers.GptOssConfig, transformers.GptOssForCausalLM, GPT_OSS),
        "gpt_oss_mxfp4": (transformers.GptOssConfig, transformers.GptOssForCausalLM, GPT_OSS),
        "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM, {"sliding_window": None}),
        "qwen3_moe": (
            transformers.Qwen3MoeConfig, transformers.Qwen3MoeForCausalLM,
            # Heads of 64: on a GPU SGLang's kernel for this family has no narrower ones.
            {"head_dim": 64, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48,
             "norm_topk_prob": True},
        ),
        "mixtral": (
            transformers.MixtralConfig, transformers.MixtralForCausalLM, {"num_local_experts": 4, "head_dim": 16},
        ),
    }  # fmt: skip
    config_type, model_type, extra = make[name]
    torch.manual_seed(1)
    fields = {**SIZES, "eos_token_id": 0, "bos_token_id": None, "pad_token_id": 0, **extra}
    model = model_type(_with_vision_tower(config_type, fields) if "_vl" in name else config_type(**fields))
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("sinks"):  # some of a prompt's probability; engines have them in bfloat16
                parameter.copy_((torch.randn_like(parameter) + 3).bfloat16())
            elif parameter_name.endswith("router.weight"):  # ties would part answers in bfloat16 from those in float32
                parameter.normal_(std=0.25)
            elif parameter.dim() > 1:
                parameter.normal_(std=0.08)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.05)  # biases and norms that are not trivial
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("score_correction_bias"):  # decides which experts are chosen
                buffer.normal_(std=0.05)
        in_mxfp4 = draw_experts(model) if "gpt_oss" in name else {}
    for weights in folder.glob("*.safetensors"):
        weights.unlink()
    model.save_pretrained(folder)
    if name == "gpt_oss_mxfp4":
        store_experts(folder, in_mxfp4)
    if name in ("gemma3_vl", "qwen3_vl_moe"):  # as published, which this transformers reads, but does not write
        [path] = folder.glob("*.safetensors")
        published = {
            each.replace("vision_tower.", "vision_tower.vision_model."): tensor.mT.contiguous()
            if ".experts." in each
            else tensor
            for each, tensor in load_file(path).items()
        }
        save_file(published, path, {"format": "pt"})


def _with_vision_tower(config_type: Any, fields: dict[str, Any]) -> Any:
    """The configuration of a multimodal model. Its embeddings are tied, as in the small ones that people tune."""
    if "sliding_window" in fields:
        vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
        return config_type(
            text_config=fields, vision_config={**vision, "image_size": 16, "patch_size": 4, "vision_use_head": False},
            mm_tokens_per_image=4,
            image_token_index=620, boi_token_index=621, eoi_token_index=622, eos_token_id=0,
        )  # fmt: skip
    rope = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [6, 5, 5], "mrope_interleaved": True}
    return config_type(
        text_config={**fields, "tie_word_embeddings": True, "rope_parameters": rope},
        vision_config={
            "depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "patch_size": 4,
            "out_hidden_size": fields["hidden_size"], "deepstack_visual_indexes": [0, 1],
            "num_position_embeddings": 16,
        },
        image_token_id=620, video_token_id=621, vision_start_token_id=622, vision_end_token_id=623,
        tie_word_embeddings=True, eos_token_id=0,
    )  # fmt: skip
