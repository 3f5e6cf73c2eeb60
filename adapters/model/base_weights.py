"""Tells whether two workers have the same base model, also where its sizes are the same."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

from adapters.errors import BaseModelInvalid
from adapters.model.base_model import BaseModel

# As SGLang: files of the first kind that the directory has are the weights.
_KINDS = (("*.safetensors",), ("*.bin", "*.pt"), ("*.gguf",))
_SAMPLES = 256  # of each file
_SAMPLE_BYTES = 256
_NOT_IDENTITY = ("_name_or_path", "transformers_version")  # of config.json: who wrote it, and where


def weights_digest(model_dir: Path | str) -> str:
    """Digest of `config.json` and of the weights' names, sizes and a sample of their bytes; 32 hexadecimal digits.

    The sample is 64 KiB of each file, spread evenly, so large models take no longer to start. Weights that were trained
    on differ nearly everywhere. A change of a few numbers can be missed. A directory without weights, as for
    `--load-format dummy`, has the digest of its `config.json`. Raises BaseModelInvalid if a file cannot be read.
    """
    folder = Path(model_dir)
    BaseModel.read(folder)  # its errors say what is wrong with config.json
    digest = hashlib.blake2b(digest_size=16)
    try:
        config = json.loads((folder / "config.json").read_bytes())
        kept = {key: value for key, value in config.items() if key not in _NOT_IDENTITY}
        digest.update(json.dumps(kept, sort_keys=True).encode())
        for path in _weights_of(folder):
            with path.open("rb", buffering=0) as file:
                size = os.fstat(file.fileno()).st_size
                digest.update(f"\n{path.name} {size}\n".encode())
                last = max(0, size - _SAMPLE_BYTES)
                for place in sorted({last * sample // (_SAMPLES - 1) for sample in range(_SAMPLES)}):
                    digest.update(os.pread(file.fileno(), _SAMPLE_BYTES, place))
    except OSError as error:
        raise BaseModelInvalid(f"{error.filename or folder} cannot be read ({error.strerror})") from error
    return digest.hexdigest()


def _weights_of(folder: Path) -> list[Path]:
    for patterns in _KINDS:
        if found := sorted(path for pattern in patterns for path in folder.glob(pattern)):
            return found
    return []
