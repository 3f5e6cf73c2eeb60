"""`make setup` on machines of new users: another Python, and one without what makes environments."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# As Debian's without python3-venv: the environment is there when it fails, without pip. WITH_PIP is where it has that.
PYTHON = """#!/bin/sh
case "$1" in
    -c) exec {python} -c "import sys; sys.version_info = ({version}, 0, 'final', 0); $2" ;;
    -m) mkdir -p "$3/bin" && printf '#!/bin/sh\n' > "$3/bin/python" && chmod +x "$3/bin/python"
        test -e "$WITH_PIP" || {{ echo 'ensurepip is not available' >&2; exit 1; }}
        cp "$3/bin/python" "$3/bin/pip" ;;
esac
"""


def make(folder: Path, target: str, version: tuple[int, int]) -> subprocess.CompletedProcess[str]:
    program = folder / "python"
    program.write_text(PYTHON.format(python=sys.executable, version=f"{version[0]}, {version[1]}"))
    program.chmod(0o755)
    words = [f"VENV={folder}/cpu", f"PYTHON={program}", f"GPU_VENV={folder}/gpu", f"GPU_PYTHON={program}"]
    environment = {"PATH": os.environ["PATH"], "WITH_PIP": str(folder / "with pip")}
    return subprocess.run(
        ["make", *words, target], cwd=ROOT, capture_output=True, text=True, env=environment, timeout=120
    )


@pytest.mark.parametrize(("target", "folder"), [("setup", "cpu"), ("setup-gpu", "gpu")])
def test_an_environment_that_was_not_made_is_made_the_next_time(tmp_path: Path, target: str, folder: str):
    first = make(tmp_path, target, (3, 12))
    assert first.returncode != 0
    assert "ensurepip is not available" in first.stderr
    (tmp_path / "with pip").touch()
    second = make(tmp_path, target, (3, 12))
    assert (second.returncode, second.stderr) == (0, "")
    assert (tmp_path / folder / ".installed").exists()


@pytest.mark.parametrize(
    ("target", "version", "is_taken"),
    [
        ("setup", (3, 10), False),
        ("setup", (3, 11), True),
        ("setup", (3, 13), True),
        ("setup", (3, 14), False),
        ("setup-gpu", (3, 11), False),
        ("setup-gpu", (3, 12), True),
    ],
)
def test_a_python_without_builds_is_refused_before_anything_is_installed(
    tmp_path: Path, target: str, version: tuple[int, int], is_taken: bool
):
    (tmp_path / "with pip").touch()
    done = make(tmp_path, target, version)
    assert (done.returncode == 0) is is_taken
    assert ("Installing" in done.stdout) is is_taken
    assert is_taken or f"(found {version[0]}.{version[1]})" in done.stderr
