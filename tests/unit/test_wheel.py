"""What an installation has at its top: one package, so that it collides with no other distribution."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Of a checkout only: measurements, the protocol's source, types of generated code.
NOT_INSTALLED = (
    "prelude/bench/results/",
    "prelude/cluster/control/control.proto",
    "prelude/cluster/control/control_pb2.pyi",
)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    shutil.copytree(ROOT / "prelude", source / "prelude", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    code = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
    subprocess.run([sys.executable, "-c", code, folder], cwd=source, check=True, capture_output=True, text=True)
    (found,) = folder.glob("*.whl")
    return found


@pytest.mark.slow
def test_only_prelude_is_at_the_top(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (record,) = (name for name in archive.namelist() if name.endswith(".dist-info/RECORD"))
        installed = {line.rsplit(",", 2)[0] for line in archive.read(record).decode().splitlines()}
    assert record.startswith("prelude_serve-")
    assert {name.partition("/")[0] for name in installed} == {"prelude", record.partition("/")[0]}
    listed = subprocess.run(["git", "ls-files", "prelude"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    wanted = {name for name in listed.splitlines() if not name.startswith(NOT_INSTALLED) and (ROOT / name).exists()}
    assert wanted - installed == set()


@pytest.mark.slow
def test_an_installed_wheel_runs(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    code = "import prelude; from prelude.cli.main import main; print(prelude.__file__); main(['--version'])"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.splitlines() == [str(tmp_path / "site" / "prelude" / "__init__.py"), "prelude 0.1.0"], (
        done.stderr
    )


def test_a_folder_called_prelude_hides_nothing(tmp_path: Path) -> None:
    """As a checkout in the folder from which somebody starts a cluster: engines are `python -m prelude.…`."""
    (tmp_path / "prelude" / "router").mkdir(parents=True)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-m", "prelude.cli.main", "--version"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.stdout == "prelude 0.1.0\n", done.stderr
