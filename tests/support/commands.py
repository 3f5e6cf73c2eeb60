"""Runs `prelude …` in this process, and what most commands are run on."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from cli.main import main

SMALL_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2, "hidden_size": 8, "intermediate_size": 16,
    "num_attention_heads": 2, "vocab_size": 100,
}  # fmt: skip


def run_command(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    """(exit status, stdout, stderr)"""
    status = 0
    try:
        main([str(word) for word in words])
    except SystemExit as ended:
        status = int(ended.code or 0)
    output = capsys.readouterr()
    return status, output.out, output.err


@contextmanager
def refused(capsys: pytest.CaptureFixture[str], says: str) -> Iterator[None]:
    """A command in the block exits with 1, and its error matches."""
    with pytest.raises(SystemExit, match=r"^1$"):
        yield
    assert re.search(says, capsys.readouterr().err)
