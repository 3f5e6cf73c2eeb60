"""The reference for what an adapter must compute: plain float32 with transformers, and peft for PEFT adapters."""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from adapters.errors import AdapterMalformed
from adapters.formats import Limits
from adapters.model.base_model import BaseModel, name_of_experts, name_of_module
from adapters.model.normal_form import Adapter, ExpertFactors, LoraFactors, ReftFactors

UNLIMITED = Limits(max_rank=1 << 20, max_bytes=1 << 50)
_EXPERT_KEY = re.compile(r".*\.layers\.\d+\..*\.experts\.\d+\.(?P<module>\w+)\.lora_[AB].*")


def load_model(model_dir: Path | str) -> Any:
    """The base model in float32, ready to run."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, Mxfp4Config

    base = BaseModel.read(model_dir)
    kind = AutoModelForImageTextToText if base.is_multimodal else AutoModelForCausalLM
    unpacked: dict[str, Any] = {"quantization_config": Mxfp4Config(dequantize=True)} if base.has_mxfp4 else {}
    return kind.from_pretrained(model_dir, dtype=torch.float32, **unpacked).float().eval()


@contextmanager
def peft_adapted(model: Any, directory: Path) -> Iterator[Any]:
    """Yield the model in peft's layers; None if peft would drop a tensor (fused or foreign names).

    The model is restored at the end.
    """
    from peft import LoraConfig, PeftModel, get_peft_model
    from peft.utils.save_and_load import load_peft_weights, set_peft_model_state_dict

    config = LoraConfig.from_pretrained(str(directory))
    config.inference_mode = True
    config.lora_dropout = 0.0  # for training only, and peft's wrappers of experts refuse any
    weights = load_peft_weights(str(directory), device="cpu")
    if not _peft_converts_experts(config, weights):
        yield None
        return
    try:
        peft_model = get_peft_model(model, config)
    except ValueError as error:
        if "not found in the base model" not in str(error):
            raise AdapterMalformed(f"peft refuses {directory}: {error}") from error
        yield None
        return
    assert isinstance(peft_model, PeftModel)
    try:
        peft_model.eval()
        try:
            result: Any = set_peft_model_state_dict(peft_model, weights)
            has_taken_all = not result.unexpected_keys
        except RuntimeError as error:
            if "size mismatch" not in str(error) or not config.target_parameters:
                raise AdapterMalformed(f"peft refuses {directory}: {error}") from error
            has_taken_all = False  # peft wrapped the parameters of one module in the other order
        yield peft_model if has_taken_all else None
    finally:
        peft_model.unload()
        if hasattr(model, "peft_config"):
            del model.peft_config


def _peft_converts_experts(config: Any, weights: Mapping[str, Any]) -> bool:
    """False for a LoRA on single experts that peft would refuse, or change when it joins the experts of a layer.

    peft 0.21 wants gate_proj with up_proj, and one rank. It forgets alphas by pattern, and
    it doubles rank and alpha of the two joined projections, which changes the scale of rsLoRA.
    """
    found = {match["module"] for key in weights if (match := _EXPERT_KEY.fullmatch(key))}
    together = ({"gate_proj", "up_proj"}, {"w1", "w3"})
    return not found or (
        all(not some & found or some <= found for some in together)
        and not (config.rank_pattern or config.alpha_pattern or config.use_rslora)
    )


@contextmanager
def adapted(model: Any, adapter: Adapter) -> Iterator[None]:
    """Adapt every token that the model reads inside the block."""
    modules = {name.replace("language_model.layers", "layers"): each for name, each in model.named_modules()}
    by_layer: dict[int, dict[tuple[int, str], ExpertFactors]] = {}
    for (layer, expert, module), factors in adapter.experts.items():
        by_layer.setdefault(layer, {})[expert, module] = factors
    hooks = []
    try:
        for layer, of_experts in by_layer.items():
            merge, restore = _expert_hooks(of_experts)
            hooks.append(modules[name_of_experts(layer)].register_forward_pre_hook(merge))
            hooks.append(modules[name_of_experts(layer)].register_forward_hook(restore, always_call=True))
        for (layer, module), lora in adapter.lora.items():
            hooks.append(_lora_on(modules, layer, module, lora))
        for layer, reft in adapter.reft.items():
            hooks.append(modules[f"model.layers.{layer}"].register_forward_hook(_reft_hook(reft, model)))
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _expert_hooks(of_experts: Mapping[tuple[int, str], ExpertFactors]) -> tuple[Callable[..., None], ...]:
    """(before, after) hooks of a layer's experts: while they run, their weights are W + s B A.

    transformers has no module for one expert; peft merges in the same way.
    """
    originals: dict[str, torch.Tensor] = {}

    def merge(experts: Any, _inputs: Any) -> None:
        for (expert, module), factors in of_experts.items():
            name = "down_proj" if module == "down_proj" else "gate_up_proj"
            weight = getattr(experts, name)  # [experts, out, in]; of gate_up_proj the first half of out is gate
            if name not in originals:
                originals[name] = weight.data
                weight.data = weight.data.clone()
            rows = factors.stored_b.shape[0]
            begin = rows if module == "up_proj" else 0
            weight.data[expert, begin : begin + rows] += factors.scale * (
                _tensor(factors.b, weight) @ _tensor(factors.a, weight)
            )

    def restore(experts: Any, _inputs: Any, _output: Any) -> None:
        for name in list(originals):
            getattr(experts, name).data = originals.pop(name)

    return merge, restore


def _lora_on(modules: Mapping[str, Any], layer: int, module: str, factors: LoraFactors) -> Any:
    """Hook a projection, or its rows of the fused one that GLM-4 has in its place."""
    target = modules.get(name_of_module(layer, module)) or modules[name_of_module(layer, "gate_up_proj")]
    a, b = _tensor(factors.a, target.weight), _tensor(factors.b, target.weight)
    before = target.out_features - len(b) if module == "up_proj" else 0
    after = target.out_features - len(b) - before

    def add(_module: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        change = factors.scale * ((inputs[0] @ a.T) @ b.T)
        return output + (torch.nn.functional.pad(change, (before, after)) if before or after else change)

    return target.register_forward_hook(add)


def _reft_hook(factors: ReftFactors, model: Any) -> Callable[[Any, Any, Any], Any]:
    a, b, bias = (_tensor(each, model) for each in (factors.a, factors.b, factors.bias))

    def add(_module: Any, _inputs: Any, output: Any) -> Any:
        stream = output[0] if isinstance(output, tuple) else output
        stream = stream + factors.scale * ((stream @ a.T + bias) @ b)
        return (stream, *output[1:]) if isinstance(output, tuple) else stream

    return add


def _tensor(array: np.ndarray, like: Any) -> torch.Tensor:
    """On the device and in the dtype of a model or a tensor."""
    return torch.from_numpy(array.copy()).to(like.device, like.dtype)  # torch does not support read-only arrays
