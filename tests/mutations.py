"""Breaks random places of the product, one at a time, and says which the unit tests notice.

    python tests/mutations.py --seed 1 --number 20 [DIR]

DIR is a clean checkout with an environment in .venv; the default is this one. A break is shown to the tests that mirror
its module, then to those of its whole package. Modules are put back afterwards. Exit status 1 if a break survives.
"""

import argparse
import ast
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGES = ("adapters", "cluster", "engine", "observability", "prefill_worker", "router", "training")
_COMPARED = {"==": "!=", "!=": "==", "<": ">=", "<=": ">", ">": "<=", ">=": "<", " in ": " not in ", " is ": " is not "}
_TIMEOUT_S = 900


@dataclass(frozen=True, slots=True)
class Break:
    """Characters from `start` to `end` of a module become `after`."""

    path: Path
    line: int
    start: int
    end: int
    before: str
    after: str


def breaks_of(path: Path, source: str) -> Iterator[Break]:
    """All places of a module where a break keeps it valid."""
    starts = [0]
    for line in source.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    text = source.encode()

    def at(node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset

    def replaced(node: ast.expr | ast.stmt, start: int, end: int, after: str) -> Break:
        return Break(path, node.lineno, start, end, text[start:end].decode(), after)

    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            start, end = at(node.left)[1], at(node.comparators[0])[0]
            between = text[start:end].decode()
            for sign, other in _COMPARED.items():
                if between.strip() == sign.strip():
                    yield replaced(node, start, end, between.replace(sign, other, 1))
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yield replaced(node, at(node)[0], at(node)[0] + len("not "), "")
        elif isinstance(node, ast.BoolOp) and len(node.values) == 2:
            start, end = at(node.values[0])[1], at(node.values[1])[0]
            between, word = text[start:end].decode(), "and" if isinstance(node.op, ast.And) else "or"
            if between.strip() == word:
                yield replaced(node, start, end, between.replace(word, "or" if word == "and" else "and"))
        elif isinstance(node, ast.Return) and node.value is not None:
            yield replaced(node, *at(node.value), "None")
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            yield replaced(node, *at(node), "pass")
        elif isinstance(node, ast.Constant) and type(node.value) is int and node.col_offset:
            yield replaced(node, *at(node), f"({node.value} + 1)")


def is_noticed(root: Path, module: Path) -> bool:
    """By the tests that mirror the module, from the nearest folder outwards."""
    python = root / ".venv" / "bin" / "python"
    folder = root / "tests" / "unit" / module.parent
    while not folder.is_dir():
        folder = folder.parent
    package = root / "tests" / "unit" / module.parts[0]
    for tests in dict.fromkeys((folder, package)):
        command = [python, "-m", "pytest", "-x", "-q", "-n", "0", "-m", "not long", "-p", "no:cacheprovider", tests]
        try:
            ran = subprocess.run(command, cwd=root, capture_output=True, timeout=_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return True  # it hangs
        if ran.returncode:
            return True
    return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", type=Path, nargs="?", default=Path(__file__).parents[1])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--number", type=int, default=20)
    arguments = parser.parse_args()
    root = arguments.root.resolve()
    if subprocess.run(["git", "status", "--porcelain", *PACKAGES], cwd=root, capture_output=True, check=True).stdout:
        sys.exit(f"{root} has changes that are not committed; they would be lost")
    paths = sorted(path for package in PACKAGES for path in (root / package).rglob("*.py") if "_pb2" not in path.name)
    places = [each for path in paths for each in breaks_of(path, path.read_text())]
    num_noticed = 0
    for each in random.Random(arguments.seed).sample(places, arguments.number):
        module, source = each.path.relative_to(root), each.path.read_bytes()
        try:
            each.path.write_bytes(source[: each.start] + each.after.encode() + source[each.end :])
            noticed = is_noticed(root, module)
        finally:
            each.path.write_bytes(source)
        num_noticed += noticed
        said = f"{module}:{each.line}: {each.before.strip()!r} -> {each.after.strip()!r}"
        print(f"{'noticed ' if noticed else 'SURVIVES'} {said}", flush=True)
    print(f"{num_noticed} of {arguments.number} noticed (seed {arguments.seed}, of {len(places):,} places)")
    sys.exit(num_noticed < arguments.number)


if __name__ == "__main__":
    main()
