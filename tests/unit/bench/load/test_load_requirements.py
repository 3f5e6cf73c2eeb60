"""`pip install '.[bench]'` has all that `prelude bench load` imports."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import venv
from pathlib import Path

import pytest
from support.bench.streaming_mock import MockServer

ROOT = Path(__file__).parents[4]


@pytest.mark.long
async def test_it_installs_into_a_fresh_environment_without_torch(tmp_path: Path) -> None:
    shutil.copytree(
        ROOT, tmp_path / "source", ignore=shutil.ignore_patterns(".*", "build", "*.egg-info", "__pycache__")
    )
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env" / "bin" / "python"

    def call(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([str(python), *words], capture_output=True, text=True, timeout=600, cwd=tmp_path)

    done = call("-m", "pip", "install", "-q", f"{tmp_path / 'source'}[bench]")
    assert done.returncode == 0, done.stderr
    names = {each["name"] for each in json.loads(call("-m", "pip", "list", "--format", "json").stdout)}
    assert "aiohttp" in names
    assert not names & {"torch", "sglang", "transformers"}

    async with MockServer().running() as server:
        words = ("--url", server.url, "--num-requests", "8", "--json", "a.json")
        done = await asyncio.to_thread(call, "-m", "cli.main", "bench", "load", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "a.json").stat().st_size > 1000
