"""A model and rows, for whole runs."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from support.training.small_runs import make_model, preference_rows, sft_rows, write_jsonl


@dataclass(frozen=True)
class Setting:
    model: Path
    sft: Path
    preferences: Path
    held_out: Path
    held_out_preferences: Path


@pytest.fixture(scope="session")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Setting:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("setting")
    return Setting(
        make_model(folder / "model"),
        write_jsonl(folder / "sft.jsonl", sft_rows(24)),
        write_jsonl(folder / "preferences.jsonl", preference_rows(24)),
        write_jsonl(folder / "held-out.jsonl", sft_rows(4, first=24)),
        write_jsonl(folder / "held-out-preferences.jsonl", preference_rows(4)),
    )
