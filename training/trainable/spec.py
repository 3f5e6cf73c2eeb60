"""The specification of an adapter to train: kind, rank, scale, modules and layers, positions."""

import math
from dataclasses import dataclass
from typing import Literal

from adapters.model.base_model import ATTENTION_MODULES, MODULES, BaseModel
from adapters.model.normal_form import POSITIONS, Positions
from training.errors import AdapterUntrainable, OptionInvalid

Kind = Literal["lora", "direft", "loreft"]
KINDS: tuple[Kind, ...] = ("lora", "direft", "loreft")


@dataclass(frozen=True, slots=True)
class AdapterSpec:
    """An adapter before it is trained. Raises AdapterUntrainable for values that no adapter can have."""

    kind: Kind
    rank: int = 16
    alpha: float = 32.0  # of LoRA
    positions: Positions = "prefill"
    modules: tuple[str, ...] | None = None  # projections that LoRA changes; None: all that workers serve
    layers: tuple[int, ...] | None = None  # None: all

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise AdapterUntrainable(f"the kind is {self.kind!r}; {', '.join(KINDS)} can be trained")
        if self.positions not in POSITIONS:
            raise AdapterUntrainable(f"the positions are {self.positions!r}; {' and '.join(POSITIONS)} exist")
        if self.rank < 1:
            raise AdapterUntrainable(f"the rank is {self.rank}; it must be at least 1")
        if self.modules is not None and self.kind != "lora":
            raise AdapterUntrainable(f"modules are for lora; {self.kind} changes the residual stream after layers")
        if not all(math.isfinite(value) for value in (self.alpha, self.scale)):
            raise AdapterUntrainable(f"alpha is {self.alpha} and the scale {self.scale}; both must be finite")

    @property
    def scale(self) -> float:
        """s of the normal form, so that a learning rate carries over ranks (PreFT, appendix C)."""
        return self.alpha / self.rank if self.kind == "lora" else 1 / math.sqrt(self.rank)

    def check_decay(self, weight_decay: float) -> None:
        """Raises OptionInvalid."""
        if self.kind == "loreft" and weight_decay:
            # It changes h by W - R, and R cannot get smaller: decay would take W, and so the adapter, to -R.
            raise OptionInvalid(
                f"the weight decay is {weight_decay:g}; loreft has none, because smaller factors do not bring it "
                "nearer to the base model. Use 0, or direft"
            )

    def layers_of(self, base: BaseModel) -> tuple[int, ...]:
        """The layers that are changed. Raises AdapterUntrainable for what the model does not have."""
        if self.kind != "lora" and self.rank >= base.hidden:
            raise AdapterUntrainable(
                f"the rank is {self.rank}; it must be below the model's hidden size, {base.hidden}"
            )
        layers = tuple(range(base.num_layers)) if self.layers is None else tuple(sorted(set(self.layers)))
        if not layers:
            raise AdapterUntrainable("no layer is to be trained; name one, or leave layers out for all")
        for layer in layers:
            if not 0 <= layer < base.num_layers:
                raise AdapterUntrainable(f"layer {layer} is to be trained; the model has 0 to {base.num_layers - 1}")
        return layers

    def modules_of(self, base: BaseModel) -> tuple[str, ...]:
        """The projections that LoRA changes in every layer. Raises AdapterUntrainable for one that is not served."""
        if self.modules is None:
            return base.slot_modules()
        if not self.modules:
            raise AdapterUntrainable("no module is to be trained; name one, or leave modules out for all")
        for module in self.modules:
            if module not in MODULES:
                raise AdapterUntrainable(
                    f"LoRA on {module!r} would not be served; {', '.join(base.slot_modules())} can be trained"
                )
            if module not in base.slot_modules():
                raise AdapterUntrainable(
                    f"LoRA on {module!r} of a mixture of experts is LoRA on experts, which is not trained; "
                    f"{', '.join(ATTENTION_MODULES)} can be trained"
                )
        return tuple(module for module in MODULES if module in self.modules)
