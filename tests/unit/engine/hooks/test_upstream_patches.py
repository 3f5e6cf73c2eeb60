"""Patches for SGLang's own faults: each is named by its hook, has a test, and fits the installed release."""

import importlib.util
import os
import subprocess
from pathlib import Path

import pytest

from engine.hooks.ledger import HOOKS

FOLDER = Path(__file__).parents[4] / "docs" / "upstream"
PATCHES = {path.stem for path in FOLDER.glob("*.patch")}


def test_patches_have_the_names_of_hooks() -> None:
    assert PATCHES
    assert {hook.name for hook in HOOKS} >= PATCHES


@pytest.mark.parametrize("patch", sorted(PATCHES))
def test_a_patch_fits_the_installed_release(patch: str) -> None:
    text = (FOLDER / f"{patch}.patch").read_text()
    assert "\n+++ b/test/registered/unit/" in text
    spec = importlib.util.find_spec("sglang")
    assert spec is not None
    assert spec.origin is not None
    packages = Path(spec.origin).parents[1]
    # Not as a part of this repository, whose files git would take the paths for.
    outside = {**os.environ, "GIT_CEILING_DIRECTORIES": str(packages.parent)}
    command = ["git", "apply", "--check", "--verbose", "-p2", "--include=sglang/*", "-"]
    checked = subprocess.run(
        command, cwd=packages, env=outside, input=text, text=True, capture_output=True, check=False
    ).stderr
    assert checked.count("Checking patch sglang/") == text.count("\n+++ b/python/sglang/")
    assert "error" not in checked
