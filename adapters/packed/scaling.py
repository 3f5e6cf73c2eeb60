"""Change how strongly a packed adapter acts."""

from pathlib import Path

import numpy as np

from adapters.formats.safetensors_file import encode
from adapters.model.normal_form import widened
from adapters.model.serving import check_fits
from adapters.packed.reader import read_packed


def scale_packed(path: Path, scale: float) -> None:
    """Multiply the effect of LoRA and of ReFT by `scale`, in place: both end with their B.

    The digest in the header stays that of the revision. Call it before an engine maps the file. Blocking. Raises
    AdapterIncompatible if a value does not fit the dtype any more; the file is then of no use.
    """
    packed = read_packed(path)
    dtype = packed.metadata.dtype
    data = np.memmap(path, np.uint8, "r+")[-packed.num_bytes :]
    begin = 0
    for name, tensor in sorted(packed.tensors.items()):  # in the order of the file
        own = data[begin : begin + tensor.nbytes].view(tensor.dtype).reshape(tensor.shape)
        begin += tensor.nbytes
        if name.endswith(".b"):
            for piece in own:  # of one layer or expert, since float32 takes more memory
                with np.errstate(over="ignore"):
                    scaled = widened(piece) * np.float32(scale)
                check_fits(f"{name} at adapter_scale {scale:g}", scaled, dtype)
                piece[...] = np.frombuffer(encode(scaled, dtype)[2], piece.dtype).reshape(piece.shape)
