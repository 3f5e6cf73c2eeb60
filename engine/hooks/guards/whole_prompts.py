"""Refuses the option that cuts prompts without a word."""

from __future__ import annotations

from typing import Any


def check_whole_prompts(role: str, server_args: Any) -> None:
    """Raise ValueError if an engine of ours would cut prompts. Stock engines, the baseline of benchmarks, may."""
    if role != "stock" and server_args.allow_auto_truncate:
        raise ValueError(
            "--allow-auto-truncate cannot be used: each engine of a pair would cut a prompt to its own limit; remove "
            "it from extra_arguments, and prompts that are too long are refused"
        )
