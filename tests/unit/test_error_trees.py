"""The tree of errors at the top of an `errors.py` is that of its classes."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TREES = sorted(
    path.relative_to(ROOT).as_posix()
    for path in ROOT.glob("*/**/errors.py")
    if not path.is_relative_to(ROOT / "tests") and "├──" in path.read_text().partition("\nfrom __future__")[0]
)
_BRANCH = re.compile(r"^(?P<before>[ │]*)[├└]── (?P<names>\w+(?:, \w+)*)", re.MULTILINE)


def drawn(text: str) -> dict[str, str]:
    """Each error in a drawing, with its parent."""
    root = re.search(r"^ *(\w+)\n *[├└]──", text, re.MULTILINE)
    assert root
    above = {-1: root[1]}  # by the column of the branch
    parents = {}
    for branch in _BRANCH.finditer(text):
        column = len(branch["before"])
        above = {at: name for at, name in above.items() if at < column}
        names = branch["names"].split(", ")
        parents |= dict.fromkeys(names, above[max(above)])
        above[column] = names[-1]
    return parents


def declared(tree: ast.Module) -> dict[str, str]:
    """Each error class of a module, with its first base."""
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    return {each.name: each.bases[0].id for each in classes if each.bases and isinstance(each.bases[0], ast.Name)}


def test_some_errors_have_a_tree():
    assert "adapters/errors.py" in TREES


@pytest.mark.parametrize("path", TREES)
def test_the_drawing_is_the_hierarchy(path: str):
    tree = ast.parse((ROOT / path).read_text())
    drawing, classes = drawn(ast.get_docstring(tree, clean=False) or ""), declared(tree)
    errors = {name: parent for name, parent in classes.items() if parent not in ("Exception", "object")}
    assert {name: parent for name, parent in drawing.items() if name in classes} == errors
