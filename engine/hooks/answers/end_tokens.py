"""Bodies of the hooks for end tokens whose id is 0, which SGLang takes for none."""

from __future__ import annotations

from typing import Any

_ANY_OTHER = 1  # SGLang reads no more of it than that it is a token


def trim_token_0(original: Any, manager: Any, output: Any, finished_reason: Any, no_stop_trim: bool) -> Any:
    """Keep the token that ended an answer out of its text."""
    if finished_reason and finished_reason.get("matched") == 0:
        finished_reason = {**finished_reason, "matched": _ANY_OTHER}
    return original(manager, output, finished_reason, no_stop_trim)


def end_at_token_0(original: Any, model: Any) -> Any:
    """The end tokens of a model: those of its configuration, and of its defaults for generation."""
    found = original(model)
    is_0 = getattr(model.hf_generation_config, "eos_token_id", None) == 0
    return {*found, 0} if is_0 else found
