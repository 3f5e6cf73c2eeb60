"""Keeps libraries' warnings and progress bars out of a command's output."""

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

# Read by libraries when they are imported. gRPC's core reports each fork of a process that has channels.
_QUIET = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "TQDM_DISABLE": "1", "GRPC_VERBOSITY": "ERROR"}


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
