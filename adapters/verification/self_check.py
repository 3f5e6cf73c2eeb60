"""Check an adapter as a worker uses it: read it, pack it, read that back, compare what both compute.

If the base model's weights are available, the model's output under the packed form is compared with the reference's:
peft's own for a PEFT directory that peft reads, else the normal form's in float32. Needs torch.
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
from adapters.model.base_model import BaseModel
from adapters.model.manifest import Manifest, revision_id_of
from adapters.model.normal_form import Adapter
from adapters.model.serving import EngineDtype, why_experts_are_refused
from adapters.packed import read_packed, write_packed
from adapters.packed.export import export_packed

if TYPE_CHECKING:
    import torch

# Largest difference of log-probabilities, relative to the adapter's own largest effect on them; plus an absolute one.
MODEL_TOLERANCE: dict[EngineDtype, float] = {"float32": 1e-4, "bfloat16": 0.1, "float16": 0.02}
_MODEL_TOLERANCE_ABSOLUTE = 1e-4
_MAX_MODEL_BYTES = 8 * 1024**3  # of weight files; in float32 they may take twice that
_PROMPT_TOKENS = 24


@dataclass(frozen=True, slots=True)
class Deployment:
    """The fields of `cluster.yaml` that decide whether an adapter loads, or their defaults."""

    limits: Limits = field(default_factory=Limits)
    dtype: EngineDtype = "bfloat16"


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes of one adapter on each tier."""

    files: int  # the weight files it was read from
    disk: int  # its packed form, on a worker's disk
    host: int  # the tensors of its packed form, in the memory of each engine process that holds it; page-locked on GPU


@dataclass(frozen=True, slots=True)
class ModelCheck:
    """Log-probabilities on a random prompt: of the base model alone, of the reference and of the packed form."""

    reference: str  # "peft" or "normal_form"
    effect: float  # the largest change against the base model
    error: float  # the largest difference between the packed form and the reference
    tolerance: float


@dataclass(frozen=True, slots=True)
class SelfCheck:
    """The results for an adapter that loads."""

    manifest: Manifest
    revision_id: str
    footprint: Footprint
    changes_nothing: bool  # every change that it makes is exactly zero
    model: ModelCheck | None
    model_skipped: str  # why there is no model check; empty when there is one
    warnings: tuple[str, ...]  # about its files
    not_served: str  # why workers refuse it although it can be imported; empty if they accept it

    @property
    def problems(self) -> tuple[str, ...]:
        """One sentence for each wrong number; empty for a sound adapter."""
        found: list[str] = []
        if self.model is None:
            return ()
        if not np.isfinite([self.model.effect, self.model.error]).all():
            found.append("under this adapter the model's output is not finite")
        elif self.model.error > self.model.tolerance:
            found.append(
                f"log-probabilities under the packed form differ from the reference by {self.model.error:.2g}; "
                f"at most {self.model.tolerance:.2g} is rounding"
            )
        if self.changes_nothing and self.model.effect != 0:
            found.append(f"its factors are zero, but the model's output changes by {self.model.effect:.2g}")
        if not self.changes_nothing and self.model.effect == 0:
            found.append("its factors are not zero, but the model's output is exactly the base model's")
        return tuple(found)


def check_adapter(directory: Path, model_dir: Path, deployment: Deployment, *, run_model: bool = True) -> SelfCheck:
    """Run all checks. Raises AdapterError if the adapter would be refused, BaseModelInvalid for the model."""
    base, limits = BaseModel.read(model_dir), deployment.limits
    adapter = read_adapter(directory, base, limits)
    with tempfile.TemporaryDirectory(prefix="prelude-verify-") as folder:
        path = Path(folder) / "packed"
        write_packed(adapter, base, deployment.dtype, path)
        packed = read_packed(path)
        export_packed(packed, Path(folder) / "served")
        served = read_adapter(Path(folder) / "served", base, limits)
        footprint = Footprint(adapter.num_file_bytes, path.stat().st_size, packed.num_bytes)
    skipped = _why_no_model(model_dir) if run_model else "it was not requested"
    manifest = Manifest.of(adapter)
    return SelfCheck(
        manifest=manifest,
        revision_id=revision_id_of(adapter),
        footprint=footprint,
        changes_nothing=_changes_nothing(served),
        model=None if skipped else compare_outputs(model_dir, directory, adapter, served, deployment.dtype),
        model_skipped=skipped,
        warnings=adapter.warnings,
        not_served=why_experts_are_refused(manifest.expert_rank, limits.max_expert_rank),
    )


def _changes_nothing(adapter: Adapter) -> bool:
    products = [(each.a, each.b) for factors in (adapter.lora, adapter.experts) for each in factors.values()]
    products += [(np.column_stack((each.a, each.bias)), each.b) for each in adapter.reft.values()]
    return not any(a.any() and b.any() for a, b in products)


def compare_outputs(
    model_dir: Path, directory: Path, adapter: Adapter, served: Adapter, dtype: EngineDtype
) -> ModelCheck:
    """Run the base model in float32 on one random prompt: alone, under the reference, and under the packed form."""
    import torch

    from adapters.formats.peft.config import CONFIG_NAME
    from adapters.verification import reference

    model = reference.load_model(model_dir)
    generator = np.random.default_rng(0)
    prompt = torch.from_numpy(generator.integers(0, model.config.get_text_config().vocab_size, (1, _PROMPT_TOKENS)))

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
    with reference.adapted(model, served), routing.repeated():
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
