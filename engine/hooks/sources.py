"""Python sources below a folder, such as that of an unpacked wheel: read, and never imported."""

from __future__ import annotations

import ast
import functools
import inspect
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

Function = ast.FunctionDef | ast.AsyncFunctionDef
_WORD = re.compile(r"(?:def )?[^\W\d]\w*")


class Module:
    """One file. `name` is its dotted name."""

    def __init__(self, name: str, path: Path) -> None:
        self.name = name
        with path.open(encoding="utf-8") as file:
            self._lines = file.readlines()
        self.text = "".join(self._lines)
        self.tree = ast.parse(self.text, str(path))

    def source(self, node: ast.AST) -> str:
        """The lines of a node; of a function, those that `inspect.getsource` gives."""
        first = min(each.lineno for each in (node, *getattr(node, "decorator_list", ()))) - 1
        if isinstance(node, Function):
            return "".join(inspect.getblock(self._lines[first:]))
        return "".join(self._lines[first : getattr(node, "end_lineno", None)])

    def users(self, name: str) -> str:
        """Source of the functions, methods and statements that bind or use a global name."""
        units: list[ast.AST] = []
        for each in self.tree.body:
            units += [*each.decorator_list, *each.bases, *each.body] if isinstance(each, ast.ClassDef) else [each]
        return "".join(self.source(unit) for unit in units if name in strings(unit, "id", "name", "asname"))

    @functools.cached_property
    def identifiers(self) -> set[str]:
        return identifiers(self.tree)

    def names_in_calls(self, name: str) -> set[str]:
        """The names in calls of a global name, or of its attributes."""
        calls = (
            each for each in ast.walk(self.tree) if isinstance(each, ast.Call) and name in strings(each.func, "id")
        )
        return {each for call in calls for each in identifiers(call)}


class Sources:
    """The modules below a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._modules: dict[Path, Module] = {}

    def holder(self, target: str) -> tuple[Module, list[str]] | None:
        """The innermost module of a dotted name, and the names inside of it."""
        parts = target.split(".")
        for count in range(len(parts), 0, -1):
            base = self._folder.joinpath(*parts[:count])
            for path in (base.with_name(f"{base.name}.py"), base / "__init__.py"):
                if path.is_file():
                    return self._read(path), parts[count:]
        return None

    def find(self, target: str, num_imports: int = 8) -> tuple[Module, ast.AST] | None:
        """The statement that a dotted name leads to, and its module; through at most so many absolute imports."""
        held = self.holder(target)
        if held is None or not num_imports:
            return None
        module, names = held
        found: ast.AST = module.tree
        for number, name in enumerate(names, 1):
            statements = list(_statements(found))
            for each in (each for each in statements if isinstance(each, ast.ImportFrom)):
                for alias in each.names:
                    if alias.name == "*" or name == (alias.asname or alias.name):
                        original = name if alias.name == "*" else alias.name
                        lead = ".".join([each.module or "", original, *names[number:]])
                        if imported := self.find(lead, num_imports - 1):
                            return imported
            bound = [each for each in statements if _binds(each, name)]
            if not bound:
                return None
            found = bound[-1]
        return module, found

    def containing(self, package: str, *texts: str) -> Iterator[Module]:
        """The modules of a package that have one of the texts."""
        for path in sorted((self._folder / package).rglob("*.py")):
            text = path.read_text(encoding="utf-8")
            if any(each in text for each in texts):
                yield self._read(path)

    @functools.cached_property
    def words(self) -> Counter[str]:
        """How often SGLang has each word; "def x" is the definitions of x, which do not count for x."""
        found: Counter[str] = Counter()
        for path in (self._folder / "sglang").rglob("*.py"):
            found.update(_WORD.findall(path.read_text(encoding="utf-8")))
        return found

    def _read(self, path: Path) -> Module:
        if path not in self._modules:
            dotted = ".".join(path.relative_to(self._folder).with_suffix("").parts).removesuffix(".__init__")
            self._modules[path] = Module(dotted, path)
        return self._modules[path]


def identifiers(tree: ast.AST) -> set[str]:
    """All names, with attributes, keywords, and strings that look like names."""
    return {each for each in strings(tree, "id", "name", "attr", "arg", "value") if each.isidentifier()}


def strings(tree: ast.AST, *fields: str) -> set[str]:
    """Values of these fields of all nodes that are strings."""
    values = (getattr(node, field, None) for node in ast.walk(tree) for field in fields)
    return {each for each in values if isinstance(each, str)}


def _statements(node: ast.AST) -> Iterator[ast.stmt]:
    """Statements of a module or class, also those in branches of `if` and `try`."""
    for field in ("handlers", "orelse", "body"):
        for each in getattr(node, field, ()):
            yield each
            if isinstance(each, ast.If | ast.Try | ast.ExceptHandler):
                yield from _statements(each)


def _binds(node: ast.stmt, name: str) -> bool:
    if isinstance(node, Function | ast.ClassDef):
        return node.name == name
    heads = [*getattr(node, "names", ()), *getattr(node, "targets", ()), getattr(node, "target", None)]
    return any(name in strings(head, "id", "name", "asname") for head in heads if head)
