"""Libraries that commands use: their warnings and bars are no output, and one that is missing is named."""

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from cluster.errors import StartError

# Read by libraries when they are imported. gRPC's core reports each fork of a process that has channels.
_QUIET = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "TQDM_DISABLE": "1", "GRPC_VERBOSITY": "ERROR"}

_OF_TRAINING = ("torch", "transformers", "tqdm", "safetensors", "starlette", "uvicorn", "zstandard")


def quieten_imports() -> None:
    """Have libraries that are imported from now on show no progress bars and no notices. Errors still show."""
    for variable, value in _QUIET.items():
        os.environ.setdefault(variable, value)


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Inside, no warning is printed or logged. Errors still show."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


@contextmanager
def needing(extras: str = "train") -> Iterator[None]:
    """Raises StartError if the block imports a library of these extras that is not installed."""
    try:
        yield
    except ImportError as error:
        if (error.name or "").partition(".")[0] not in _OF_TRAINING:
            raise
        raise StartError(f"{error}; training needs `pip install -e '.[{extras}]'` in a checkout of Prelude") from error
