"""Tiny models of every family that is trained, and the plain computation that training is compared with.

The plain computation is what serving does, one example at a time: the context is read with the adapter, the answer
without it over the same KV cache. It shares no code with `training` but the parameters.
"""

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import torch
from support.adapters.tiny_model import TINY

from adapters.model.base_model import BaseModel, name_of_module
from adapters.packed import PACKED_NAME
from training.trainable.adapter import TrainableAdapter
from training.trainable.exports import ExportFile
from training.trainable.factors import TrainableLora, TrainableLoreft
from training.trainable.packed import ServedWeights

FAMILIES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
}


def make_tiny(family: str, folder: Path, dtype: torch.dtype = torch.float64, **fields: Any) -> tuple[Any, BaseModel]:
    """(model, sizes) with random weights; in float64 its norms do not pass through float32."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {key: value for key, value in TINY.items() if key != "architectures"}
    if family == "gemma3_text":
        fields = {"sliding_window_pattern": 2, **fields}  # both kinds of layers
    config = AutoConfig.for_model(family, **sizes | fields, max_position_embeddings=512, initializer_range=0.15)
    config.architectures = [FAMILIES[family]] if family in FAMILIES else None
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).eval()
        for parameter in model.parameters():
            if parameter.ndim == 1:  # biases and norms that are not trivial
                parameter.data += 0.1 * torch.randn_like(parameter)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    base = BaseModel.read(folder)
    model = model.to(dtype)
    if dtype == torch.float64:
        if base.experts is not None:
            model.set_experts_implementation("eager")  # the default has no float64
        for module in model.modules():
            if type(module).__name__.endswith("RMSNorm"):
                module.forward = _exact_norm(module)
    return model, base


def _exact_norm(norm: Any) -> Any:
    """transformers' RMSNorm without its detour through float32. Gemma's weights are those beyond 1."""
    is_gemma = type(norm).__name__.startswith("Gemma")

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        weight, epsilon = (norm.weight + 1, norm.eps) if is_gemma else (norm.weight, norm.variance_epsilon)
        return weight * hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + epsilon)

    return forward


def scramble(adapter: TrainableAdapter, seed: int = 0) -> TrainableAdapter:
    """Move every parameter, so that the adapter changes something everywhere. Returns the adapter."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in adapter.parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(parameter.dtype)
        parameter.data += 0.1 * noise
    return adapter


def plain_logprobs(
    model: Any, adapter: TrainableAdapter | None, context: Sequence[int], answer: Sequence[int], everywhere: bool
) -> torch.Tensor:
    """[len(answer)] log-probabilities, differentiable in the adapter's parameters. Nothing is attached to the model."""
    from transformers import DynamicCache

    cache = DynamicCache()
    with _applied(model, adapter):
        logits = model(input_ids=torch.tensor([list(context)]), past_key_values=cache, use_cache=True).logits[0, -1:]
    if len(answer) > 1:
        with _applied(model, adapter if everywhere else None):
            inputs = torch.tensor([list(answer[:-1])])
            rest = model(input_ids=inputs, past_key_values=cache, use_cache=True).logits[0]
        logits = torch.cat([logits, rest])
    return logits.log_softmax(dim=-1).gather(1, torch.tensor(list(answer))[:, None]).squeeze(1)


@contextmanager
def _applied(model: Any, adapter: TrainableAdapter | None) -> Iterator[None]:
    handles = []
    modules = dict(model.named_modules())
    try:
        if adapter is not None:
            for layer, module, lora in adapter.lora():
                handles.append(modules[name_of_module(layer, module)].register_forward_hook(_lora(lora)))
            for layer, reft in adapter.reft():
                handles.append(modules[f"model.layers.{layer}"].register_forward_hook(_reft(reft)))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _lora(factors: TrainableLora) -> Any:
    def add(_module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        return output + factors.scale * (inputs[0] @ factors.a.T) @ factors.b.T

    return add


def _reft(factors: Any) -> Any:
    def add(_module: Any, _inputs: Any, h: torch.Tensor) -> torch.Tensor:
        if isinstance(factors, TrainableLoreft):
            r = factors.rotation().T
            return h + factors.scale * (h @ factors.w.T + factors.bias - h @ r.T) @ r
        return h + factors.scale * (h @ factors.a.T + factors.bias) @ factors.b

    return add


def write_served(weights: ServedWeights, path: Path) -> None:
    with closing(ExportFile(weights.num_bytes, in_memory=False)) as file:
        weights.write(file.mapped)
        (file.folder / PACKED_NAME).rename(path)
