"""An adapter in training: its factors by module and layer."""

from collections.abc import Iterator
from typing import Self

import torch
from torch import nn

from adapters.model.base_model import BaseModel
from adapters.model.normal_form import Adapter, Positions
from training.trainable.factors import TrainableDireft, TrainableLora, TrainableLoreft, TrainableReft
from training.trainable.spec import AdapterSpec


class TrainableAdapter(nn.Module):
    """The factors of one adapter. Those of LoRA and of ReFT never are in one adapter."""

    def __init__(self, spec: AdapterSpec, base: BaseModel):
        super().__init__()
        self.spec = spec
        self.base = base
        self._lora = nn.ModuleDict()  # "<layer>:<module>"
        self._reft = nn.ModuleDict()  # "<layer>"

    @classmethod
    def create(cls, spec: AdapterSpec, base: BaseModel, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Self:
        """A new adapter that changes nothing yet. Raises AdapterUntrainable if it does not fit the model.

        `dtype` is that of the masters. The same seed gives the same adapter; torch's own random state is left alone.
        """
        adapter = cls(spec, base)
        layers = spec.layers_of(base)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            if spec.kind == "lora":
                for layer in layers:
                    for module in spec.modules_of(base):
                        size_out, size_in = base.shape_of(module)
                        factors = TrainableLora(size_in, size_out, spec.rank, spec.scale, dtype)
                        adapter._lora[f"{layer}:{module}"] = factors
            else:
                reft = TrainableDireft if spec.kind == "direft" else TrainableLoreft
                for layer in layers:
                    adapter._reft[str(layer)] = reft(base.hidden, spec.rank, spec.scale, dtype)
        return adapter

    def begin_as(self, other: Adapter) -> None:
        """Compute what `other` computes: both LoRA, `other` of at most this rank, on places that this adapter has.

        What goes beyond its rank and its places stays as it was created, and so changes nothing.
        """
        with torch.no_grad():
            for (layer, module), lora in other.lora.items():
                own = self._lora[f"{layer}:{module}"]
                own.a[: lora.rank] = torch.tensor(lora.a)
                own.b[:, : lora.rank] = torch.tensor(lora.b) * (lora.scale / own.scale)

    @property
    def positions(self) -> Positions:
        return self.spec.positions

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())

    def lora(self) -> Iterator[tuple[int, str, TrainableLora]]:
        """(layer, module, factors)"""
        for key, factors in self._lora.items():
            layer, _, module = key.partition(":")
            assert isinstance(factors, TrainableLora)
            yield int(layer), module, factors

    def reft(self) -> Iterator[tuple[int, TrainableReft]]:
        """(layer, factors)"""
        for key, factors in self._reft.items():
            assert isinstance(factors, TrainableDireft | TrainableLoreft)
            yield int(key), factors

    def normal_form(self) -> Adapter:
        """What it computes now, as everything outside training has it."""
        return Adapter(
            {(layer, module): factors.factors() for layer, module, factors in self.lora()},
            {layer: factors.factors() for layer, factors in self.reft()},
            self.positions,
            self.base.fingerprint,
            num_file_bytes=0,
        )
