"""Keeps libraries' chatter out of a command's output."""

from __future__ import annotations

import logging
import warnings


def silence_libraries() -> None:
    """No progress bars and no warnings of torch, transformers and peft, for the rest of the process."""
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
