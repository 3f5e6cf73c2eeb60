"""Check a LoRA's two tensors before they are read."""

from __future__ import annotations

from collections.abc import Mapping

from adapters.errors import AdapterIncompatible, AdapterMalformed
from adapters.formats.checks import check_rank
from adapters.formats.folder import AdapterFolder
from adapters.formats.peft.config import CONFIG_NAME, PeftConfig
from adapters.formats.safetensors_file import SafetensorsFile
from adapters.model.base_model import BaseModel


def checked_rank(
    key: str,
    tensors: Mapping[str, str],
    weights: SafetensorsFile,
    config: PeftConfig,
    size: tuple[int, int],
    base: BaseModel,
    folder: AdapterFolder,
    count: int = 1,
) -> int:
    """The rank by "A" and "B" of the module `key`, of `size` (out, in), each with all of `count` experts.

    Raises AdapterMalformed, and AdapterIncompatible for other sizes than the module has.
    """
    a_name, b_name = tensors["A"], tensors["B"]
    a_shape, b_shape = weights.shape_of(a_name), weights.shape_of(b_name)
    for name, shape in ((a_name, a_shape), (b_name, b_shape)):
        if len(shape) != 2:
            raise AdapterMalformed(f"tensor {name!r} has the shape {list(shape)}; it must have two dimensions")
        if 0 in shape:
            raise AdapterMalformed(f"tensor {name!r} has the shape {list(shape)}; a LoRA has a rank of at least 1")
    if a_shape[0] != b_shape[1]:
        raise AdapterMalformed(
            f"{a_name!r} has rank {a_shape[0]}, but {b_name!r} has rank {b_shape[1]}; they must agree"
        )
    rank, rest = divmod(a_shape[0], count)
    if rest or rank not in config.ranks:
        says = " or ".join(map(str, sorted(config.ranks)[:5])) + (f" for each of {count} experts" if count > 1 else "")
        raise AdapterMalformed(
            f"{a_name!r} has rank {a_shape[0]}, but {CONFIG_NAME} says {says}; correct r or rank_pattern"
        )
    size_out, size_in = size
    if a_shape[1] != size_in or b_shape[0] != size_out:
        raise AdapterIncompatible(
            f"{key} is {size_out} x {size_in} in the base model ({base}), but the adapter's LoRA is "
            f"{b_shape[0]} x {a_shape[1]}; it was made for another model"
        )
    check_rank(rank, key, folder)
    return rank
