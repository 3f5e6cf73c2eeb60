"""Check an adapter as a worker uses it: read it, write it for the engine, read that back, compare with the reference.

The serving form is read and applied by separate code, so that a mistake in `adapters.packed` or in the normal form
cannot hide: its factors are compared with those of the normal form. If the base model's weights are available, the
model's output is compared with the reference's (peft's, for a PEFT directory). Needs torch.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from adapters.formats import Limits, read_adapter
from adapters.model.base_model import BaseModel, name_of_module
from adapters.model.footprint import Footprint, footprint_of
from adapters.model.manifest import Manifest, revision_id_of
from adapters.model.normal_form import Adapter, ExpertFactors, LoraFactors
from adapters.model.serving import EngineDtype, why_experts_are_refused
from adapters.packed import write_for_engine
from adapters.verification.serving_form import ServingForm

if TYPE_CHECKING:
    import torch

# Largest error of a projection's change, relative to the change; rounding two factors costs about 1.4 units each.
FACTOR_TOLERANCE: dict[EngineDtype, float] = {"float32": 1e-5, "bfloat16": 2**-6, "float16": 2**-9}
# Largest difference of log-probabilities, relative to the adapter's own largest effect on them; plus an absolute one.
MODEL_TOLERANCE: dict[EngineDtype, float] = {"float32": 1e-4, "bfloat16": 0.1, "float16": 0.02}
_MODEL_TOLERANCE_ABSOLUTE = 1e-4
_MAX_MODEL_BYTES = 8 * 1024**3  # of weight files; in float32 they may take twice that
_NUM_PROBES = 8
_PROMPT_TOKENS = 24


@dataclass(frozen=True, slots=True)
class Deployment:
    """The fields of `cluster.yaml` that decide whether an adapter loads, or their defaults."""

    limits: Limits = field(default_factory=Limits)
    dtype: EngineDtype = "bfloat16"
    num_slots: int = 8


@dataclass(frozen=True, slots=True)
class FactorCheck:
    """The serving form's factors compared with the normal form's, on random inputs."""

    num_compared: int
    largest_error: float  # relative to the size of the change
    largest_error_at: str
    tolerance: float
    changes_nothing: bool  # every change is exactly zero


@dataclass(frozen=True, slots=True)
class ModelCheck:
    """Log-probabilities on a random prompt: of the base model alone, of the reference and of the serving form."""

    reference: str  # "peft" or "normal_form"
    effect: float  # the largest change against the base model
    error: float  # the largest difference between the serving form and the reference
    tolerance: float


@dataclass(frozen=True, slots=True)
class SelfCheck:
    """The results for an adapter that loads."""

    manifest: Manifest
    revision_id: str
    footprint: Footprint
    factors: FactorCheck
    model: ModelCheck | None
    model_skipped: str  # why there is no model check; empty when there is one
    warnings: tuple[str, ...]  # about its files
    not_served: str  # why workers refuse it although it can be imported; empty if they accept it

    @property
    def problems(self) -> tuple[str, ...]:
        """One sentence for each wrong number; empty for a sound adapter."""
        found = []
        if not self.factors.largest_error <= self.factors.tolerance:
            found.append(
                f"{self.factors.largest_error_at}: the serving form is {self.factors.largest_error:.2g} of the change "
                f"away from the adapter; at most {self.factors.tolerance:.2g} is rounding"
            )
        if self.model is not None:
            if not np.isfinite([self.model.effect, self.model.error]).all():
                found.append("under this adapter the model's output is not finite")
            elif self.model.error > self.model.tolerance:
                found.append(
                    f"log-probabilities under the serving form differ from the reference by {self.model.error:.2g}; "
                    f"at most {self.model.tolerance:.2g} is rounding"
                )
            if self.factors.changes_nothing and self.model.effect != 0:
                found.append(f"its factors are zero, but the model's output changes by {self.model.effect:.2g}")
            if not self.factors.changes_nothing and self.model.effect == 0:
                found.append("its factors are not zero, but the model's output is exactly the base model's")
        return tuple(found)


def check_adapter(directory: Path, model_dir: Path, deployment: Deployment, *, run_model: bool = True) -> SelfCheck:
    """Run all checks. Raises AdapterError if the adapter would be refused, BaseModelInvalid for the model."""
    base = BaseModel.read(model_dir)
    adapter = read_adapter(directory, base, deployment.limits)
    with tempfile.TemporaryDirectory(prefix="prelude-verify-") as folder:
        serving_directory = Path(folder) / "serving"
        write_for_engine(adapter, base, deployment.dtype, serving_directory)
        served = ServingForm.read(serving_directory)
        footprint = footprint_of(
            adapter,
            serving_directory,
            served.num_bytes,
            base,
            max_rank=deployment.limits.max_rank,
            max_expert_rank=deployment.limits.max_expert_rank,
            target_modules=deployment.limits.target_modules,
            num_slots=deployment.num_slots,
            dtype=deployment.dtype,
        )
    skipped = _why_no_model(model_dir) if run_model else "it was not requested"
    manifest = Manifest.of(adapter)
    return SelfCheck(
        manifest=manifest,
        revision_id=revision_id_of(adapter),
        footprint=footprint,
        factors=compare_factors(adapter, served, FACTOR_TOLERANCE[deployment.dtype]),
        model=None if skipped else compare_outputs(model_dir, directory, adapter, served, deployment.dtype),
        model_skipped=skipped,
        warnings=adapter.warnings,
        not_served=why_experts_are_refused(manifest.expert_rank, deployment.limits.max_expert_rank),
    )


def compare_factors(adapter: Adapter, served: ServingForm, tolerance: float) -> FactorCheck:
    """Compare the change that each factor pair makes to random inputs, in float64; a missing pair counts as 0."""
    generator = np.random.default_rng(0)
    errors: dict[str, float] = {}
    changes_nothing = True
    wanted_lora = {name_of_module(layer, module): factors for (layer, module), factors in adapter.lora.items()}
    for name in sorted(wanted_lora.keys() | served.lora.keys()):
        got, want = _changes(wanted_lora.get(name), served.lora.get(name), served.scale, generator)
        errors[name] = _relative_error(got, want)
        changes_nothing = changes_nothing and not got.any()
    for place in sorted(adapter.experts.keys() | served.experts.keys()):
        got, want = _changes(adapter.experts.get(place), served.experts.get(place), served.scale, generator)
        layer, expert, module = place
        errors[f"layer {layer} expert {expert} {module}"] = _relative_error(got, want)
        changes_nothing = changes_nothing and not got.any()
    for layer in sorted(adapter.reft.keys() | served.reft.keys()):
        want = got = np.zeros(1)
        size_in = adapter.reft[layer].a.shape[1] if layer in adapter.reft else served.reft[layer][0].shape[1]
        probes = generator.normal(size=(size_in, _NUM_PROBES))
        if (reft := adapter.reft.get(layer)) is not None:
            want = reft.scale * (reft.b.T.astype(np.float64) @ (reft.a @ probes + reft.bias[:, None]))
        if layer in served.reft:
            a, b, bias = (part.double().numpy() for part in served.reft[layer])
            got = b.T @ (a @ probes + bias[:, None])
        errors[f"layer {layer}"] = _relative_error(got, want)
        changes_nothing = changes_nothing and not got.any()
    worst = max(errors, key=lambda name: errors[name])
    return FactorCheck(len(errors), errors[worst], worst, tolerance, changes_nothing)


def _changes(
    factors: LoraFactors | ExpertFactors | None,
    served: tuple[torch.Tensor, torch.Tensor] | None,
    scale: float,
    generator: np.random.Generator,
) -> tuple[np.ndarray, np.ndarray]:
    """The changes that the serving form and the adapter make to random inputs."""
    want = got = np.zeros(1)
    size_in = factors.a.shape[1] if factors is not None else served[0].shape[1] if served is not None else 0
    probes = generator.normal(size=(size_in, _NUM_PROBES))
    if factors is not None:
        want = factors.scale * (factors.b.astype(np.float64) @ (factors.a @ probes))
    if served is not None:
        a, b = (part.double().numpy() for part in served)
        got = scale * (b @ (a @ probes))
    return got, want


def _relative_error(got: np.ndarray, want: np.ndarray) -> float:
    """The error relative to `want`; for a want of 0, 0 if got is exactly 0 and else infinity."""
    size = float(np.linalg.norm(want))
    if size == 0:
        return float("inf") if got.any() else 0.0
    return float(np.linalg.norm(got - want)) / size


def compare_outputs(
    model_dir: Path, directory: Path, adapter: Adapter, served: ServingForm, dtype: EngineDtype
) -> ModelCheck:
    """Run the base model in float32 on one random prompt: alone, under the reference, and under the serving form."""
    import torch

    from adapters.formats.peft.config import CONFIG_NAME
    from adapters.verification import reference

    model = reference.load_model(model_dir)
    generator = np.random.default_rng(0)
    prompt = torch.from_numpy(generator.integers(0, model.config.vocab_size, (1, _PROMPT_TOKENS)))

    def output(running: Any) -> torch.Tensor:
        with torch.inference_mode():
            return torch.log_softmax(running(input_ids=prompt).logits[0].float(), dim=-1)

    base = output(model)
    routing = _Routing(model)
    method, wanted = "normal_form", None
    if (directory / CONFIG_NAME).exists() and find_spec("peft") is not None:
        with reference.peft_adapted(model, directory) as peft_model:
            if peft_model is not None:
                with routing.recorded():
                    method, wanted = "peft", output(peft_model)
    if wanted is None:
        with reference.adapted(model, adapter), routing.recorded():
            wanted = output(model)
    with served.applied(model), routing.repeated():
        got = output(model)
    effect = float((wanted - base).abs().max())
    return ModelCheck(
        reference=method,
        effect=effect,
        error=float((got - wanted).abs().max()),
        tolerance=MODEL_TOLERANCE[dtype] * effect + _MODEL_TOLERANCE_ABSOLUTE,
    )


class _Routing:
    """Repeats the choice of experts of one run in another one: rounding flips near ties, which is no mistake."""

    def __init__(self, model: Any) -> None:
        self._routers = [module for name, module in model.named_modules() if name.endswith(".mlp.gate")]
        self._outputs: dict[Any, Any] = {}

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Record the routers' outputs inside the block."""

        def keep(router: Any, _inputs: Any, output: Any) -> None:
            self._outputs[router] = output

        yield from self._hooked(keep)

    @contextmanager
    def repeated(self) -> Iterator[None]:
        """Replay the recorded outputs inside the block."""
        yield from self._hooked(lambda router, _inputs, _output: self._outputs[router])

    def _hooked(self, hook: Any) -> Iterator[None]:
        hooks = [router.register_forward_hook(hook) for router in self._routers]
        try:
            yield
        finally:
            for each in hooks:
                each.remove()


def _why_no_model(model_dir: Path) -> str:
    """Why the model cannot be run here; empty when it can."""
    num_bytes = sum(path.stat().st_size for path in model_dir.glob("*.safetensors"))
    if not num_bytes:
        return f"{model_dir} has no weights (*.safetensors)"
    if num_bytes > _MAX_MODEL_BYTES:
        return f"the model's weights have {num_bytes:,} bytes; at most {_MAX_MODEL_BYTES:,} are run in float32"
    return ""
