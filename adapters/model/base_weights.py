"""Tells whether two workers have the same base model, also where its sizes are the same."""

import hashlib
import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from adapters.errors import BaseModelInvalid
from adapters.model.base_model import BaseModel

# As SGLang: files of the first kind that the directory has are the weights.
_KINDS = (("*.safetensors",), ("*.bin", "*.pt"), ("*.gguf",))
_SAMPLES = 1024  # of all files together
_MIN_SAMPLES = 8  # of each file
_SAMPLE_BYTES = 256
_READS_AT_A_TIME = 32  # a volume over an object store takes some 0.1 s for each
_NOT_IDENTITY = ("_name_or_path", "transformers_version")  # of config.json: who wrote it, and where
_EDITION = "1"  # of the way in which the digest is computed; another needs another number


def are_known_to_differ(ours: str, theirs: str) -> bool:
    """True for two digests of the same edition that differ. Others, or none, say nothing of one another."""
    return ours != theirs and ours.partition(":")[0] == theirs.partition(":")[0]


def weights_digest(model_dir: Path | str, overrides: str = "") -> str:
    """Digest of `config.json`, what the engine is told in its place, and the weights: "1:" and 32 hexadecimal digits.

    Of the weights it takes their names, sizes and a sample of their bytes.
    The sample is some 256 KiB, spread evenly, so large models take no longer. Weights that were trained on differ
    nearly everywhere. A change of a few numbers can be missed. A directory without weights, as for
    `--load-format dummy`, has the digest of its `config.json`. Raises BaseModelInvalid if a file cannot be read.
    """
    folder = Path(model_dir)
    BaseModel.read(folder)  # its errors say what is wrong with config.json
    digest = hashlib.blake2b(overrides.encode(), digest_size=16)
    try:
        config = json.loads((folder / "config.json").read_bytes())
        kept = {key: value for key, value in config.items() if key not in _NOT_IDENTITY}
        digest.update(json.dumps(kept, sort_keys=True).encode())
        for part in _samples(_weights_of(folder)):
            digest.update(part)
    except OSError as error:
        raise BaseModelInvalid(f"{error.filename or folder} cannot be read ({error.strerror})") from error
    return f"{_EDITION}:{digest.hexdigest()}"


def _weights_of(folder: Path) -> list[Path]:
    for patterns in _KINDS:
        if found := sorted(path for pattern in patterns for path in folder.glob(pattern)):
            return found
    return []


def _samples(paths: list[Path]) -> Iterator[bytes]:
    """Of each file its name and size, and bytes from evenly spread places."""
    count = max(_MIN_SAMPLES, _SAMPLES // max(1, len(paths)))
    with ThreadPoolExecutor(_READS_AT_A_TIME) as pool:
        for path in paths:
            with path.open("rb", buffering=0) as file:
                size = os.fstat(file.fileno()).st_size
                yield f"\n{path.name} {size}\n".encode()
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
                last = max(0, size - _SAMPLE_BYTES)
                places = sorted({last * number // (count - 1) for number in range(count)})
                yield from pool.map(lambda place, fd=file.fileno(): os.pread(fd, _SAMPLE_BYTES, place), places)
