"""`pip install '.[bench]'` has all that `prelude bench load` imports: other packages are hidden from it here."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tomllib
import venv
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from support.bench.streaming_mock import MockServer

ROOT = Path(__file__).parents[4]
HANG_GUARD_S = 60.0
# Each process that starts with this imports nothing but the standard library, this project and the given modules.
GUARD = """
import sys
class Guard:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] not in {allowed!r}:
            raise ModuleNotFoundError(f"{{name}} is not among the requirements", name=name)
sys.meta_path.insert(0, Guard)
"""


def closure(wanted: Iterable[Requirement]) -> set[str]:
    """The distributions that an installation of these requirements has, as far as they are installed here."""
    found: set[tuple[str, frozenset[str]]] = set()
    left = list(wanted)
    while left:
        requirement = left.pop()
        key = (canonicalize_name(requirement.name), frozenset(requirement.extras))
        if key in found:
            continue
        found.add(key)
        try:
            others = [Requirement(text) for text in requires(requirement.name) or ()]
        except PackageNotFoundError:  # optional, or for another platform
            continue
        extras = requirement.extras or {""}
        left += [
            each for each in others if each.marker is None or any(each.marker.evaluate({"extra": e}) for e in extras)
        ]
    return {name for name, _ in found}


def modules_of_the_extra() -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["bench"]]
    installed = closure(map(Requirement, wanted))
    return {
        module
        for module, distributions in packages_distributions().items()
        if installed & set(map(canonicalize_name, distributions))
    }


def run_with(modules: set[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """A load by two processes against a mock server, and its file."""
    packages = {each.parent.name for each in ROOT.glob("*/__init__.py")}
    allowed = sorted({*modules, *packages, *sys.stdlib_module_names})
    (folder / "sitecustomize.py").write_text(GUARD.format(allowed=allowed))
    environment = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}
    command = (sys.executable, "-m", "cli.main", "bench", "load")

    def call(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*command, *words], capture_output=True, text=True, timeout=HANG_GUARD_S, cwd=ROOT, env=environment
        )

    async def load() -> subprocess.CompletedProcess[str]:
        server = MockServer(gap_s=0.001)
        async with server.running():
            return await asyncio.to_thread(
                call, "--url", server.url, "--num-requests", "8", "--concurrency", "4", "--processes", "2",
                "--random-input-len", "8", "--random-output-len", "3", "--json", str(folder / "a.json"),
            )  # fmt: skip

    return asyncio.run(load())


@pytest.mark.slow
def test_the_extra_has_what_a_load_imports(tmp_path: Path) -> None:
    modules = modules_of_the_extra()
    assert {"aiohttp", "psutil"} <= modules
    assert not modules & {"torch", "sglang", "transformers", "starlette"}
    done = run_with(modules, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "8 of 8 requests" in done.stdout


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


def test_a_package_that_is_missing_is_noticed(tmp_path: Path) -> None:
    done = run_with(modules_of_the_extra() - {"aiohttp"}, tmp_path)
    assert done.returncode != 0
    assert "aiohttp is not among the requirements" in done.stdout + done.stderr
