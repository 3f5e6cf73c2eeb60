"""What another SGLang release means for the hooks, as Markdown: `python -m engine.hooks.check VERSION|DIR`.

Downloads that release, or reads DIR: an unpacked wheel, or a folder of site-packages. Installs and imports nothing of
it. Exits with 1 if there is anything to do (docs/engine-upgrade.md).
"""

from __future__ import annotations

import ast
import difflib
import hashlib
import importlib.metadata
import re
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
from engine.hooks.sources import Function, Module, Sources, identifiers, strings
from engine.pin import SGLANG_VERSION

# What became of targets. "digest only": the module of a global name has changed where nothing uses that name.
STATUSES = ("gone", "moved", "changed", "digest only", "unchanged", "in another package")
_LEGEND = """\
Names: attributes, keywords and strings of the hook's body that its target or the module had and has no longer; in
bold those that SGLang has nowhere. Some may be Prelude's own. `digest only`: what the hook changes is as it was.

Diffs are from the pin to the other release; of a global or imported name, of what uses it."""
_LEAST_LIKENESS = 0.3  # of two definitions with one name, for the second to be the first one, moved
_LIKENESS_OF_ANOTHER_NAME = 0.7
_OF_PYTHON = {name for kind in (dict, list, set, str, bytes, int, BaseException) for name in dir(kind)}


@dataclass(frozen=True, slots=True)
class Finding:
    """What became of a hook's target, and the names of the hook's body that the release lacks."""

    hook: Hook
    status: str
    note: str = ""
    lost: tuple[str, ...] = ()
    diff: tuple[str, ...] = ()

    @property
    def is_harmless(self) -> bool:
        return self.status in STATUSES[-2:] and not self.note and not self.lost


@dataclass(frozen=True, slots=True)
class Target:
    """A hook's target in one release."""

    at: str
    digested: str = ""
    shown: str = ""  # what the hook changes
    names: tuple[set[str], ...] = ()  # of its module, and of what is nearer to it

    def loses(self, name: str, after: Target) -> bool:
        return any(name in own and name not in others for own, others in zip(self.names, after.names, strict=False))


def compare(hook: Hook, pin: Sources, other: Sources, own: Sources) -> Finding:
    """Compare a hook's target in two releases. `own` has the hooks' bodies."""
    package, name = hook.target.partition(".")[0], hook.target.rpartition(".")[2]
    if hook.source_sha256 == BUILTIN or not other.holder(package):
        return Finding(hook, "in another package")
    before, after = target_of(hook, pin) or Target(hook.target), target_of(hook, other)
    note = ""
    if after is None:
        after = _moved(hook, before, other)
        status, note = ("moved", f" to `{after.at}`, it seems") if after else ("gone", "")
    else:
        is_same = hashlib.sha256(after.digested.encode()).hexdigest() == hook.source_sha256
        status = "unchanged" if is_same else "changed" if before.shown != after.shown else "digest only"
        is_unused = (pin.words[name] and not other.words[name]) or (all(before.names) and not all(after.names))
        note = ", and nothing uses it" if is_unused else ""
    lost = []
    for each in sorted(names_read(own, f"{hook.fn.__module__}.{hook.fn.__qualname__}")):
        if pin.words[each] and not other.words[each]:
            lost.append(f"**`{each}`**")
        elif after and before.loses(each, after):
            lost.append(f"`{each}`")
    shown, now = (each.shown.splitlines() for each in (before, after or before))
    diff = () if status == "unchanged" else tuple(difflib.unified_diff(shown, now, lineterm=""))
    return Finding(hook, status, note, tuple(lost), diff)


def target_of(hook: Hook, sources: Sources) -> Target | None:
    """The target of a hook, if it is where the ledger says."""
    held = sources.holder(hook.target)
    if held is None or not held[1]:
        return None
    module, [name, *_] = held
    digested, shown, names = module.text, "", tuple[set[str], ...]()
    if hook.kind is not HookKind.GLOBAL:
        origin, node = sources.find(hook.target) or (module, None)
        if not isinstance(node, Function):
            return None
        digested = shown = origin.source(node)
        names = (origin.identifiers, identifiers(node))
        if origin is module:
            return Target(hook.target, digested, shown, names)
    users = module.users(name)  # the name is replaced for these only
    names = (*names, module.identifiers, module.names_in_calls(name))
    return Target(hook.target, digested, shown + users, names) if users else None


def _moved(hook: Hook, before: Target, other: Sources) -> Target | None:
    """The likeliest function of this name or with this body; for a global name, the likeliest module."""
    name, lines = hook.target.rpartition(".")[2], before.shown.splitlines()
    found: list[tuple[float, Target]] = []
    for module in other.containing(hook.target.partition(".")[0], f"def {name}(", max([name, *lines], key=len)):
        nodes = [each for each in ast.walk(module.tree) if isinstance(each, Function)]
        shown = [(f"{module.name}, line {node.lineno}", module.source(node), node.name == name) for node in nodes]
        if hook.kind is HookKind.GLOBAL:
            shown = [(module.name, module.users(name), True)]
        for at, text, has_name in shown:
            likeness = difflib.SequenceMatcher(None, lines, text.splitlines(), autojunk=False).ratio()
            if likeness >= (_LEAST_LIKENESS if has_name else _LIKENESS_OF_ANOTHER_NAME):
                found.append((likeness, Target(at, "", text, (module.identifiers,))))
    return max(found, key=lambda each: each[0])[1] if found else None


def names_read(own: Sources, body: str) -> set[str]:
    """Attributes, keywords and strings of a hook's body, and of what it uses of the hooks' package."""
    names: set[str] = set()
    done: set[tuple[Module, ast.AST]] = set()
    todo = [body]
    while todo:
        found = own.find(todo.pop())
        if found and found not in done and found[0].name.startswith("engine.hooks."):
            done.add(found)
            module, node = found
            todo += [f"{module.name}.{name}" for name in strings(node, "id")]
            names.update(_named(node))
    return {each for each in names - _OF_PYTHON if each.isidentifier()}


def _named(node: ast.AST) -> Iterator[str]:
    for each in ast.walk(node):
        if isinstance(each, ast.Attribute):
            owner = ast.unparse(each.value)
            if owner != "self" and owner not in sys.stdlib_module_names and "prelude_" not in owner:
                yield each.attr
        elif isinstance(each, ast.keyword):
            yield each.arg or ""
        elif isinstance(each, ast.Constant) and isinstance(each.value, str):
            yield each.value


def lost_imports(pin: Sources, other: Sources, own: Sources) -> Iterator[str]:
    """What Prelude imports of SGLang, or names in a string, and the other release does not have."""
    for module in own.containing("engine", "sglang"):
        for node in () if module.name.startswith("engine.hooks.ledger") else ast.walk(module.tree):
            named = [f"{node.module}.{each.name}" for each in node.names] if isinstance(node, ast.ImportFrom) else []
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                named = [node.value]
            for each in named:
                if re.fullmatch(r"sglang(\.\w+)+", each) and pin.find(each) and not other.find(each):
                    yield f"- `{each}`, in `{module.name}`"


def report(title: str, findings: list[Finding], imports: list[str], requirements: list[str]) -> str:
    """The page. `requirements` is the difference of what the releases require."""
    findings = sorted(findings, key=lambda each: (STATUSES.index(each.status), -len(each.lost)))
    counts = Counter(each.status for each in findings)
    lines = [f"# {title}", "", f"{len(findings)} hooks: {', '.join(f'{n} {status}' for status, n in counts.items())}."]
    lines += ["", _LEGEND, "", "| hook | target | became | lines | names |", "|---|---|---|---|---|"]
    for each in findings:
        added, removed = (sum(line.startswith(sign) for line in each.diff[2:]) for sign in "+-")
        cells = (f"`{each.hook.target}`", each.status + each.note, f"+{added} −{removed}", ", ".join(each.lost))
        lines += [f"| {each.hook.name} | {' | '.join(cells)} |"]
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
        folders = [folder_of(each, Path(scratch)) for each in (SGLANG_VERSION, release)]
        pin, other, own = map(Sources, (*folders, Path(__file__).parents[2]))
        findings = [compare(hook, pin, other, own) for hook in HOOKS]
        imports = list(lost_imports(pin, other, own))
        asked = [
            line for line in difflib.ndiff(_requirements(folders[0]), _requirements(folders[1])) if line[0] in "+-"
        ]
    print(report(f"SGLang {release} beside {SGLANG_VERSION}", findings, imports, asked))
    return int(bool(imports) or not all(each.is_harmless for each in findings))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: python -m engine.hooks.check VERSION|DIR")
    raise SystemExit(main(sys.argv[1]))
