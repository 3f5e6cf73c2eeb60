"""A LoRA's two tensors, checked before they are read."""

from collections.abc import Mapping
from dataclasses import dataclass

from adapters.errors import AdapterIncompatible, AdapterMalformed
from adapters.formats.folder import AdapterFolder
from adapters.formats.peft.config import CONFIG_NAME, PeftConfig
from adapters.formats.safetensors_file import SafetensorsFile
from adapters.model.base_model import BaseModel


@dataclass(frozen=True, slots=True)
class Source:
    """A PEFT directory's tensors and configuration, and what they must fit."""

    weights: SafetensorsFile
    config: PeftConfig
    base: BaseModel
    folder: AdapterFolder

    def scale_and_dtype(
        self, key: str, tensors: Mapping[str, str], size: tuple[int, int], parts: tuple[str, ...], count: int = 1
    ) -> tuple[float, str]:
        """Check "A" and "B" of the module `key` with these parts, of `size` (out, in), each of all of `count` experts.

        Raises AdapterMalformed, and AdapterIncompatible for other sizes than the module has.
        """
        a_name, b_name = tensors["A"], tensors["B"]
        a_shape, b_shape = self.weights.shape_of(a_name), self.weights.shape_of(b_name)
        for name, shape in ((a_name, a_shape), (b_name, b_shape)):
            if len(shape) != 2:
                raise AdapterMalformed(f"tensor {name!r} has the shape {list(shape)}; it must have two dimensions")
            if 0 in shape:
                raise AdapterMalformed(f"tensor {name!r} has the shape {list(shape)}; a LoRA has a rank of at least 1")
        if a_shape[0] != b_shape[1]:
            raise AdapterMalformed(
                f"{a_name!r} has rank {a_shape[0]}, but {b_name!r} has rank {b_shape[1]}; they must agree"
            )
        (rank, rest), ranks = divmod(a_shape[0], count), sorted(self.config.ranks)
        if rest or rank not in ranks:
            says = " or ".join(map(str, ranks[:5])) + (f" for each of {count} experts" if count > 1 else "")
            raise AdapterMalformed(
                f"{a_name!r} has rank {a_shape[0]}, but {CONFIG_NAME} says {says}; correct r or rank_pattern"
            )
        size_out, size_in = size
        if a_shape[1] != size_in or b_shape[0] != size_out:
            raise AdapterIncompatible(
                f"{key} is {size_out} x {size_in} in the base model ({self.base}), but the adapter's LoRA is "
                f"{b_shape[0]} x {a_shape[1]}; it was made for another model"
            )
        self.folder.limits.check_rank(rank, key)
        self.folder.limits.check_modules(parts)
        return self.config.scale_of(key, rank), self.weights.common_dtype((a_name, b_name))
