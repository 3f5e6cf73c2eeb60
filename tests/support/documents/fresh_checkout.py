"""A checkout as a newcomer has it after `make setup`: the files that git knows, an environment with nothing else."""

import re
import shutil
import subprocess
import venv
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from support.documents.pages import ROOT
from support.requirements import required_by

from process.collisions import DISTRIBUTION

_SCRIPT = "#!{python}\nfrom cli.start import main\n\nmain()\n"


def fresh_checkout(folder: Path) -> Path:
    """Packages of .venv are links to those of this environment: an installation would take minutes."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)
    venv.create(folder / ".venv", symlinks=True)
    (site,) = (folder / ".venv" / "lib").glob("python*/site-packages")
    for name in _installed_by_make_setup():
        _link(name, site)
    _link(DISTRIBUTION, site, only=(".dist-info", ".egg-info"))  # whose entry point SGLang finds
    (site / "checkout.pth").write_text(str(folder))
    script = folder / ".venv" / "bin" / "prelude"
    script.write_text(_SCRIPT.format(python=folder / ".venv" / "bin" / "python"))
    script.chmod(0o755)
    (folder / ".venv" / ".installed").touch()  # newer than the requirements
    return folder


def _installed_by_make_setup() -> set[str]:
    locked = "".join((ROOT / "requirements" / name).read_text() for name in ("cpu.txt", "demo.txt"))
    return required_by("torch") | set(re.findall(r"^([\w.-]+)==", locked, re.MULTILINE))


def _link(name: str, site: Path, only: str | tuple[str, ...] = "") -> None:
    try:
        found = distribution(name)
    except PackageNotFoundError:  # for another release of Python
        return
    for top in {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
        if top.endswith(only) and not (site / top).exists():
            (site / top).symlink_to(found.locate_file(top))
