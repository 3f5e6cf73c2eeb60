"""Other distributions may not share names of packages with this one."""

import subprocess
import sys
from pathlib import Path

import pytest

from cli.start import main
from process import collisions

ROOT = Path(__file__).parents[3]


def test_nothing_collides_here():
    assert collisions.collision() is None


def test_every_package_is_looked_at():
    found = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"tests"}
    assert found == set(collisions.PACKAGES)


def test_another_distribution_with_a_package_of_ours_is_refused(tmp_path: Path, monkeypatch, capsys):
    """As the public index's `adapters` has one."""
    info = tmp_path / "adapters-1.3.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: adapters\nVersion: 1.3.0\n")
    (info / "top_level.txt").write_text("adapters\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(SystemExit) as exit_:
        main()
    assert exit_.value.code == 1
    said = capsys.readouterr().err
    assert said.startswith("prelude: adapters has a package 'adapters', as Prelude has: ")
    assert said.endswith("install Prelude in a virtual environment of its own\n")


def test_a_folder_that_hides_a_package_of_ours_is_refused(tmp_path: Path):
    """As Python finds a `training` of one's own in the working directory."""
    (tmp_path / "training").mkdir()
    (tmp_path / "training" / "__init__.py").write_text("raise SystemExit('a stranger')")
    ran = subprocess.run(
        [sys.executable, "-c", "from cli.start import main; main()"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (ran.returncode, ran.stdout) == (1, "")
    assert f"the package 'training' is {tmp_path}/training/__init__.py, and not {ROOT}/training" in ran.stderr
