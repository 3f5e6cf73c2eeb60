"""What another SGLang release means for the hooks, as Markdown: `python -m engine.hooks.check VERSION|DIR`.

Downloads that release, or reads DIR: an unpacked wheel, or a folder of site-packages. Installs and imports nothing of
it. Exits with 1 if there is anything to do (docs/engine-upgrade.md).
"""

import ast
import difflib
import functools
import importlib.metadata
import subprocess
import sys
import tempfile
import zipfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from engine.hooks.hook import Hook, HookKind
from engine.hooks.installation import BUILTIN
from engine.hooks.ledger import HOOKS
from engine.pin import SGLANG_VERSION

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Finding:
    """What became of a hook's target: gone, changed, unchanged, or in another package than SGLang."""

    hook: Hook
    status: str
    diff: tuple[str, ...] = ()


def compare(hook: Hook, pin: Path, other: Path) -> Finding:
    """Compare a hook's target in two folders of packages."""
    if hook.source_sha256 == BUILTIN or not (other / hook.target.partition(".")[0]).is_dir():
        return Finding(hook, "in another package")
    before, after = shown(hook, pin), shown(hook, other)
    if not after:
        return Finding(hook, "gone")
    diff = difflib.unified_diff(before.splitlines(), after.splitlines(), lineterm="")
    return Finding(hook, "unchanged" if before == after else "changed", tuple(diff))


def shown(hook: Hook, folder: Path) -> str:
    """The source that a hook changes: of a function, or of what uses a global name. Empty if it is not there."""
    if hook.kind is not HookKind.GLOBAL:
        found = find(folder, hook.target)
        return _source(*found) if found and isinstance(found[1], Function) else ""
    module, _, name = hook.target.rpartition(".")
    if (found := find(folder, module)) is None:
        return ""
    path, tree = found
    units: list[ast.AST] = []
    for each in _statements(tree):
        units += [*each.decorator_list, *each.bases, *each.body] if isinstance(each, ast.ClassDef) else [each]
    return "".join(_source(path, unit) for unit in units if name in _strings(unit, "id", "name", "asname"))


def find(folder: Path, target: str, num_imports: int = 8) -> tuple[Path, ast.AST] | None:
    """The file and the statement that a dotted name leads to, through at most so many absolute imports."""
    parts = target.split(".")
    paths = (
        (count, path)
        for count in range(len(parts), 0, -1)
        for path in (folder.joinpath(*parts[:count], "__init__.py"), folder.joinpath(*parts[:count]).with_suffix(".py"))
    )
    count, path = next(((count, path) for count, path in paths if path.is_file()), (0, folder))
    if not count or not num_imports:
        return None
    found: ast.AST = _tree(path)
    for number, name in enumerate(parts[count:], count + 1):
        statements = list(_statements(found))
        for each in (each for each in statements if isinstance(each, ast.ImportFrom)):
            for alias in each.names:
                if alias.name == "*" or name == (alias.asname or alias.name):
                    original = name if alias.name == "*" else alias.name
                    lead = ".".join([each.module or "", original, *parts[number:]])
                    if imported := find(folder, lead, num_imports - 1):
                        return imported
        bound = [each for each in statements if _binds(each, name)]
        if not bound:
            return None
        found = bound[-1]
    return path, found


def lost_imports(pin: Path, other: Path, own: Path) -> Iterator[str]:
    """What Prelude's engine package imports of SGLang, and the other release does not have."""
    for path in sorted((own / "engine").rglob("*.py")):
        for node in (each for each in ast.walk(_tree(path)) if isinstance(each, ast.ImportFrom)):
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                if name.startswith("sglang.") and find(pin, name) and not find(other, name):
                    yield f"- `{name}`, in `{path.relative_to(own)}`"


@functools.cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def _source(path: Path, node: ast.AST) -> str:
    first = min(each.lineno for each in (node, *getattr(node, "decorator_list", ()))) - 1
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return "".join(lines[first : getattr(node, "end_lineno", None)])


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
    return any(name in _strings(head, "id", "name", "asname") for head in heads if head)


def _strings(tree: ast.AST, *fields: str) -> set[str]:
    """Values of these fields of all nodes that are strings."""
    values = (getattr(node, field, None) for node in ast.walk(tree) for field in fields)
    return {each for each in values if isinstance(each, str)}


def report(title: str, findings: list[Finding], imports: list[str], requirements: list[str]) -> str:
    """The page. `requirements` is the difference of what the releases require."""
    counts = Counter(each.status for each in findings)
    lines = [f"# {title}", "", f"{len(findings)} hooks: {', '.join(f'{n} {status}' for status, n in counts.items())}."]
    lines += ["", "| hook | target | became |", "|---|---|---|"]
    lines += [f"| {each.hook.name} | `{each.hook.target}` | {each.status} |" for each in findings]
    lines += ["", "## Imports that fail", "", *(imports or ["None."])]
    lines += ["", "## What SGLang requires", "", "~~~diff", *requirements, "~~~"]
    for each in findings:
        if each.diff:
            body = f"{each.hook.fn.__module__}.{each.hook.fn.__qualname__}"
            lines += ["", f"## {each.hook.name}", "", f"Its body is `{body}`.", "", "~~~diff", *each.diff, "~~~"]
    return "\n".join(lines)


def folder_of(release: str, scratch: Path) -> Path:
    """The folder that has the `sglang/` of a release or of a folder that the user gives."""
    folder = Path(release)
    if not folder.is_dir():
        installed = next(iter(importlib.metadata.distributions(name="sglang")), None)
        if installed is not None and installed.version == release:
            return Path(str(installed.locate_file("")))
        folder = scratch / release
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
        if subprocess.run([*command, "--dest", folder, f"sglang=={release}"]).returncode:
            raise SystemExit(f"SGLang {release} cannot be downloaded; give a release of the index, or a folder")
        with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
            wheel.extractall(folder, [name for name in wheel.namelist() if name.endswith((".py", "/METADATA"))])
    if not (folder / "sglang").is_dir():
        raise SystemExit(f"{folder} has no sglang/; give an unpacked wheel or a folder of site-packages")
    return folder


def _requirements(folder: Path) -> list[str]:
    lines = [
        line for path in folder.glob("sglang-*.dist-info/METADATA") for line in path.read_text("utf-8").splitlines()
    ]
    return sorted(line[15:] for line in lines if line.startswith("Requires-Dist: ") and "extra ==" not in line)


def main(release: str) -> int:
    with tempfile.TemporaryDirectory() as scratch:
        pin, other = (folder_of(each, Path(scratch)) for each in (SGLANG_VERSION, release))
        findings = [compare(hook, pin, other) for hook in HOOKS]
        imports = list(lost_imports(pin, other, Path(__file__).parents[2]))
        asked = [line for line in difflib.ndiff(_requirements(pin), _requirements(other)) if line[0] in "+-"]
    print(report(f"SGLang {release} beside {SGLANG_VERSION}", findings, imports, asked))
    return int(bool(imports) or any(each.status in ("gone", "changed") for each in findings))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: python -m engine.hooks.check VERSION|DIR")
    raise SystemExit(main(sys.argv[1]))
