"""Models for benchmarks: sizes of published models, random weights, whose values do not affect the cost.

Sizes are from the models' config.json on the Hugging Face hub: meta-llama/Llama-3.1-8B and -70B, Qwen/Qwen2.5-0.5B.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any

from bench.errors import OptionInvalid

_WEIGHTS_STD = 0.02  # the usual initialization


@dataclass(frozen=True, slots=True)
class Model:
    """One model's sizes. `config` has further fields of transformers' config; None for the demo model."""

    hidden: int
    num_layers: int
    config: Mapping[str, Any] | None


_LLAMA: Mapping[str, Any] = {
    "model_type": "llama",
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}
_QWEN: Mapping[str, Any] = {
    "model_type": "qwen2",
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "intermediate_size": 4864,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
}
# Weights in FP8: those of bfloat16 do not fit into one GPU, not even until an engine has quantized them.
_FP8 = {"quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic"}}

MODELS: Mapping[str, Model] = MappingProxyType(
    {
        "tiny": Model(256, 4, None),
        "qwen2.5-0.5b": Model(896, 24, _QWEN),
        "llama-3.1-8b": Model(4096, 32, {**_LLAMA, "num_attention_heads": 32, "intermediate_size": 14336}),
        "llama-3.1-70b-fp8": Model(8192, 80, {**_LLAMA, "num_attention_heads": 64, "intermediate_size": 28672, **_FP8}),
    }
)


def write_model(name: str, folder: Path, device: str, engine_arguments: Sequence[str]) -> None:
    """Write a model with random weights, created on `device`, and a tokenizer as a Hugging Face directory.

    No weights where engines with these arguments make up their own.
    """
    from cluster.local.demo import make_model

    model, reads_weights = MODELS[name], engines_read_weights(engine_arguments)
    if model.config is None and reads_weights:
        make_model(folder, hidden=model.hidden, num_layers=model.num_layers)
        return
    import torch
    from transformers import AutoModelForCausalLM

    config, tokenizer = config_of(name)
    if reads_weights:
        torch.manual_seed(0)
        with torch.device(device):
            network = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        with torch.no_grad():
            for weight in network.parameters():
                if weight.dim() > 1:
                    weight.normal_(std=_WEIGHTS_STD)
        network.save_pretrained(folder)
        del network
        if device == "cuda":
            torch.cuda.empty_cache()  # engines need the memory
    else:
        config.architectures = [AutoModelForCausalLM._model_mapping[type(config)].__name__]
        config.dtype = torch.bfloat16
        config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({}))


def config_of(name: str) -> tuple[Any, Any]:
    """A model's configuration for transformers, and a tokenizer."""
    from transformers import AutoConfig

    from cluster.local.demo import llama_config, make_tokenizer

    model, tokenizer = MODELS[name], make_tokenizer()
    if model.config is None:
        return llama_config(tokenizer, model.hidden, model.num_layers), tokenizer
    sizes = {"hidden_size": model.hidden, "num_hidden_layers": model.num_layers, **model.config}
    config = AutoConfig.for_model(**sizes, bos_token_id=None, eos_token_id=None)
    return config, with_vocabulary(tokenizer, config.vocab_size)


def with_vocabulary(tokenizer: Any, size: int) -> Any:
    """The tokenizer with a text for each of this many token ids.

    It never makes the new ones of a text. Of an answer's token that has no text, a chat's stream would have no event.
    """
    from tokenizers import Tokenizer

    state = json.loads(tokenizer.backend_tokenizer.to_str())
    vocabulary = state["model"]["vocab"]
    vocabulary.update({f"Ġ#{number}": number for number in range(len(vocabulary), size)})  # Ġ: a space
    whole = type(tokenizer)(
        tokenizer_object=Tokenizer.from_str(json.dumps(state)),
        eos_token=tokenizer.eos_token,
        pad_token=tokenizer.pad_token,
    )
    whole.chat_template = tokenizer.chat_template
    return whole


def require_loadable(systems: Iterable[str], engine_arguments: Sequence[str]) -> None:
    """Stock SGLang loads no adapters beside weights that it made up itself. Raises BenchError."""
    if any(name.startswith("stock") for name in systems) and not engines_read_weights(engine_arguments):
        raise OptionInvalid(
            "--engine-arguments --load-format dummy: stock SGLang loads no adapters beside weights that it made up "
            "itself; leave it out or measure other systems"
        )


def engines_read_weights(engine_arguments: Sequence[str]) -> bool:
    """Whether engines with these arguments read weights, and do not make up their own."""
    words = (word for argument in engine_arguments for word in argument.split("=", 1))
    return ("--load-format", "dummy") not in pairwise(words)
