"""What `pip install` with extras of pyproject.toml brings, and whether that is all that a process imports."""

import subprocess
import sys
import tomllib
from collections.abc import Collection
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from process.collisions import PACKAGES

ROOT = Path(__file__).parents[2]


def needed_by(*extras: str) -> set[str]:
    """The names of all distributions that Prelude requires with these extras, as they are installed here."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    of_extras = (project["optional-dependencies"][extra] for extra in extras)
    return required_by(*sum(of_extras, project["dependencies"]))


def required_by(*requirements: str) -> set[str]:
    """The names of these distributions and all that they require, as they are installed here."""
    todo = [Requirement(each) for each in requirements]
    seen: set[tuple[str, frozenset[str]]] = set()
    while todo:
        each = todo.pop()
        key = (canonicalize_name(each.name), frozenset(each.extras))
        if key in seen:
            continue
        try:
            needed = distribution(each.name).requires or []
        except PackageNotFoundError:  # for another platform or Python
            continue
        seen.add(key)
        for text in needed:
            found = Requirement(text)
            if not found.marker or any(found.marker.evaluate({"extra": extra}) for extra in ("", *each.extras)):
                todo.append(found)
    return {name for name, _ in seen}


_REFUSING = """
import sys
from importlib.metadata import packages_distributions
owners = packages_distributions()
class Refuse:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        names = {{each.lower().replace("_", "-").replace(".", "-") for each in owners.get(top, ())}}
        if names and top not in {own!r} and not names & set({allowed!r}):
            raise ModuleNotFoundError(f"{{name}}: it lacks {{sorted(names)}}", name=name)
sys.meta_path.insert(0, Refuse())
{code}
assert not set({absent!r}) & sys.modules.keys(), sorted(set({absent!r}) & sys.modules.keys())
"""


def complaint_of_imports(code: str, installed: Collection[str], absent: Collection[str] = ()) -> str:
    """Of a process that is refused what is of no installed distribution, and that may not import what is `absent`."""
    words = _REFUSING.format(own=PACKAGES, allowed=sorted(installed), code=code, absent=sorted(absent))
    done = subprocess.run([sys.executable, "-c", words], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stderr if done.returncode else ""
