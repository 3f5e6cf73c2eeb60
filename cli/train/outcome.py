"""How commands fail that need libraries of an extra."""

from collections.abc import Iterator
from contextlib import contextmanager

from cluster.errors import StartError

_LIBRARIES = ("torch", "transformers", "tqdm", "safetensors", "starlette", "uvicorn", "zstandard")


@contextmanager
def needing(extras: str = "train") -> Iterator[None]:
    """Raises StartError if the block imports a library of these extras that is not installed."""
    try:
        from transformers.utils import logging

        logging.disable_progress_bar()  # for every model that it loads
        yield
    except ImportError as error:
        if (error.name or "").partition(".")[0] not in _LIBRARIES:
            raise
        raise StartError(f"{error}; training needs `pip install -e '.[{extras}]'` in a checkout of Prelude") from error
