"""The state that a later process needs to continue a run bit-identically, as safetensors and JSON: no pickles."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import torch

from adapters.formats.safetensors_file import Encoded, write_safetensors
from training.errors import CheckpointDamaged

_FORMAT = "prelude-training-state-1"
_TENSORS, _NUMBERS = "state.safetensors", "state.json"
_CODES = {torch.float64: "F64", torch.float32: "F32"}


@dataclass(frozen=True, slots=True)
class TrainingState:
    """Between two steps. Learning rate and data order follow from `step`."""

    step: int  # done
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)  # parameters, moments, buffers
    num_tokens: int = 0  # read so far
    best_loss: float | None = None  # of evaluations so far
    best_step: int | None = None
    window: Mapping[str, tuple[float, float]] = field(default_factory=dict)  # sums and weights of the next log line

    def write(self, folder: Path) -> None:
        """Write into an empty folder. Raises OSError."""
        encoded: dict[str, Encoded] = {}
        for name, tensor in self.tensors.items():
            array = tensor.detach().cpu().contiguous().numpy()
            encoded[name] = (_CODES[tensor.dtype], tuple(tensor.shape), array)
        write_safetensors(folder / _TENSORS, encoded)
        numbers = {
            "format": _FORMAT,
            "step": self.step,
            "num_tokens": self.num_tokens,
            "best_loss": self.best_loss,
            "best_step": self.best_step,
            "window": self.window,
            "sha256": _digest(folder / _TENSORS),
        }
        (folder / _NUMBERS).write_text(json.dumps(numbers, indent=1))

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Raises CheckpointDamaged."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            numbers: dict[str, Any] = json.loads((folder / _NUMBERS).read_text())
            if numbers["format"] != _FORMAT:
                raise CheckpointDamaged(f"{folder / _NUMBERS} has the format {numbers['format']!r:.60}, not {_FORMAT}")
            if (found := _digest(folder / _TENSORS)) != numbers["sha256"]:
                raise CheckpointDamaged(
                    f"{folder / _TENSORS} has the digest {found[:12]}…, its state.json says {numbers['sha256'][:12]}…; "
                    "restore the file, or begin again in another folder"
                )
            return cls(
                step=numbers["step"],
                tensors=load_file(folder / _TENSORS),
                num_tokens=numbers["num_tokens"],
                best_loss=numbers["best_loss"],
                best_step=numbers["best_step"],
                window={name: (float(total), float(weight)) for name, (total, weight) in numbers["window"].items()},
            )
        except (OSError, ValueError, LookupError, TypeError, AttributeError, SafetensorError) as error:
            raise CheckpointDamaged(
                f"{folder} has no state to continue ({type(error).__name__}: {error}); begin again in another folder"
            ) from error


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
