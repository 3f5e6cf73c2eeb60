"""How the commands of `prelude train` fail."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

FAILED, WRONG_USAGE = 1, 2  # exit codes


_LIBRARIES = ("torch", "transformers", "tqdm", "safetensors", "starlette", "uvicorn", "zstandard")


@contextmanager
def failures_end(extras: str = "train") -> Iterator[None]:
    """Exit with 2 on wrong usage in the block, with 1 on any other failure of training."""
    needs = f"training needs `pip install -e '.[{extras}]'` in a checkout of Prelude"
    try:
        from training.errors import OptionInvalid, TrainingError

        _hide_progress_of_libraries()
    except ImportError as error:
        print(f"prelude: {error}; {needs}", file=sys.stderr)
        sys.exit(FAILED)
    try:
        yield
    except ImportError as error:
        if (error.name or "").partition(".")[0] not in _LIBRARIES:
            raise
        print(f"prelude: {error}; {needs}", file=sys.stderr)
        sys.exit(FAILED)
    except TrainingError as error:
        print(f"prelude: {error}", file=sys.stderr)
        sys.exit(WRONG_USAGE if isinstance(error, OptionInvalid) else FAILED)


def _hide_progress_of_libraries() -> None:
    """transformers shows a bar for every model that it loads."""
    from transformers.utils import logging

    logging.disable_progress_bar()
