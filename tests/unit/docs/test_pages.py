"""What the pages name exists: files, links, commands, packages, numbers of hooks."""

import ast
import importlib
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest
import yaml
from pydantic import BaseModel
from support.documents.pages import FENCE, PAGES, ROOT, blocks_of, commands_of, text_of

from cli.main import _parser
from cluster.config.load import load_cluster_config
from cluster.config.schema import ClusterConfig
from engine.hooks.hook import Platform
from engine.hooks.ledger import HOOKS, hooks_for
from engine.pin import SGLANG_VERSION

# The first part of a path that must exist here. Others are examples, or on somebody else's disk.
TOPS = {path.name for path in ROOT.iterdir() if path.is_dir() and (not path.name.startswith(".") or path.name == ".ci")}
SOURCE_SUFFIXES = (".py", ".proto", ".md", ".toml", ".yml")
PARSER = _parser()

_CODE = re.compile(r"`([^`\n]+)`")
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_PATH = re.compile(r"[\w.*-]+(?:/[\w.*-]+)*/?")


def prose_of(page: str) -> str:
    """The page without its fenced blocks."""
    return FENCE.sub("", text_of(page))


def section(page: str, heading: str) -> str:
    found = re.search(rf"^## {heading}\n(.*?)(?=^## |\Z)", text_of(page), re.DOTALL | re.MULTILINE)
    assert found, f"{page} has no section {heading!r}"
    return found[1]


def anchors_of(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def named_paths(text: str) -> Iterator[str]:
    """Paths in backticks that claim to be of this repository: below one of its folders, or a source file's name."""
    for code in _CODE.findall(text):
        if not _PATH.fullmatch(code):
            continue
        top, slash, _ = code.partition("/")
        if code.endswith(SOURCE_SUFFIXES) or (slash and top in TOPS):
            yield code


def exists(name: str, page: str) -> bool:
    """Below the root, beside the page or, for a bare file name, anywhere below the tests."""
    folders = (ROOT, (ROOT / page).parent)
    if any(next(folder.glob(name), None) for folder in folders):
        return True
    return "/" not in name and next((ROOT / "tests").rglob(name), None) is not None


@pytest.mark.parametrize("page", PAGES)
class TestNames:
    def test_paths_exist(self, page: str):
        missing = [name for name in named_paths(prose_of(page)) if not exists(name, page)]
        assert not missing

    def test_links_resolve(self, page: str):
        wrong = []
        for target in _LINK.findall(prose_of(page)):
            if target.startswith(("https://", "http://")):
                continue
            name, _, anchor = target.partition("#")
            path = (ROOT / page).parent / name if name else ROOT / page
            if not path.exists() or (anchor and anchor not in anchors_of(path)):
                wrong.append(target)
        assert not wrong


# ---- commands -------------------------------------------------------------------------------------------------------


def commands_in_prose(page: str) -> Iterator[str]:
    """`prelude …` in backticks; where brackets hold options, without and with them; of `a|b`, the first."""
    for code in _CODE.findall(prose_of(page)):
        if code.startswith("prelude ") and "…" not in code:
            code = re.sub(r"(?<=\w)\|[\w|]+", "", code)
            yield re.sub(r" ?\[[^\]]*\]", "", code)
            yield re.sub(r"[\[\]]", "", code)


def complaint_about(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    """What the command line says of a command; empty when it would run it."""
    try:
        PARSER.parse_args(shlex.split(command, comments=True)[1:])
    except SystemExit as ended:
        said = capsys.readouterr().err.splitlines()
        return said[-1] if ended.code else ""  # `prelude --version` ends well
    return ""


@pytest.mark.parametrize("page", PAGES)
class TestCommands:
    def test_commands_in_blocks_parse(self, page: str, capsys: pytest.CaptureFixture[str]):
        found = {
            command: complaint_about(command, capsys) for command in commands_of(page) if command.startswith("prelude ")
        }
        assert not {command: complaint for command, complaint in found.items() if complaint}

    @pytest.mark.slow
    def test_commands_in_prose_exist(self, page: str, capsys: pytest.CaptureFixture[str]):
        """A sentence may name a command without its arguments."""
        found = {command: complaint_about(command, capsys) for command in commands_in_prose(page)}
        assert not {
            command: complaint
            for command, complaint in found.items()
            if complaint and "the following arguments are required" not in complaint
        }

    def test_make_targets_exist(self, page: str):
        targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
        lines = [
            line for language, block in blocks_of(text_of(page)) if language == "sh" for line in block.splitlines()
        ]
        named = re.findall(
            r"^make (?:\w+=(?:<.*?>|\S+) )*([a-z-]+)", "\n".join([*lines, *_CODE.findall(prose_of(page))]), re.MULTILINE
        )
        assert not set(named) - targets


def test_the_table_of_adapter_commands_parses(capsys: pytest.CaptureFixture[str]):
    """Its first column has what follows `prelude adapters`, options in brackets; N stands for a number."""
    found = {}
    for row in re.findall(r"^\| (`.*?`) \|", section("docs/adapters.md", "Commands"), re.MULTILINE):
        for code in _CODE.findall(re.sub(r"\bN\b", "7", row)):
            if not code.startswith("prelude"):
                for command in (re.sub(r" ?\[[^\]]*\]", "", code), re.sub(r"[\[\]]", "", code)):
                    found[command] = complaint_about(f"prelude adapters {command}", capsys)
    assert len(found) > 12
    assert not {command: complaint for command, complaint in found.items() if complaint}


# ---- diffs ----------------------------------------------------------------------------------------------------------


def hunks_of(diff: str) -> Iterator[tuple[str, list[str], list[str]]]:
    """File, its lines before and its lines after, without what stands between them."""
    for part in re.split(r"^--- a/", diff, flags=re.MULTILINE)[1:]:
        name, added, *lines = part.splitlines()
        assert added == f"+++ b/{name}"
        before = [line[1:] for line in lines if line[:1] in (" ", "-")]
        yield name, before, [line[1:] for line in lines if line[:1] in (" ", "+")]


def are_in_order(wanted: list[str], lines: list[str]) -> bool:
    rest = iter(lines)
    return all(line in rest for line in wanted)


def test_worked_examples_are_of_this_tree():
    """Each file is either as the example leaves it, or as it finds it."""
    diffs = [block for language, block in blocks_of(text_of("CONTRIBUTING.md")) if language == "diff"]
    hunks = [hunk for diff in diffs for hunk in hunks_of(diff)]
    assert len(diffs) >= 8
    for name, before, after in hunks:
        lines = (ROOT / name).read_text().splitlines()
        assert are_in_order(after, lines) or (before and are_in_order(before, lines)), name


# ---- what pages say of the code -------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES)
def test_modules_imported_in_examples_exist(page: str):
    """Of this repository; other packages are the reader's."""
    for language, block in blocks_of(text_of(page)):
        for module, names in re.findall(
            r"^from ([\w.]+) import ([\w, ]+)", block if language == "python" else "", re.M
        ):
            if module.partition(".")[0] in TOPS:
                found = vars(importlib.import_module(module))
                assert not [name for name in names.split(", ") if name not in found], module


@pytest.mark.parametrize("page", PAGES)
def test_clusters_shown_are_valid(page: str, tmp_path: Path):
    for language, block in blocks_of(text_of(page)):
        if language == "yaml" and "model" in yaml.safe_load(block):
            (tmp_path / "cluster.yaml").write_text(block)
            load_cluster_config(tmp_path / "cluster.yaml")


def fields_of(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Dotted names of a section's fields, and of the sections in it."""
    for name, field in section.model_fields.items():
        yield prefix + name
        types = [field.annotation]
        for each in types:
            types += get_args(each)
            if isinstance(each, type) and issubclass(each, BaseModel):
                yield from fields_of(each, f"{prefix}{name}.")


@pytest.mark.parametrize(
    "page",
    # The first has the chart's values, the other what is gone.
    [page for page in PAGES if page not in ("docs/kubernetes.md", "CHANGELOG.md")],
)
def test_fields_of_the_configuration_exist(page: str):
    fields = set(fields_of(ClusterConfig))
    sections = {name for name in fields if any(each.startswith(f"{name}.") for each in fields)}
    named = re.findall(r"`([a-z][a-z_]*(?:\.[a-z][a-z_]*)+)`", prose_of(page))
    of_sections = {name for name in named if name.partition(".")[0] in sections and not name.endswith(".local")}
    assert of_sections - fields == set()


def test_nobody_is_told_to_install_prelude_from_an_index():
    """`prelude` is somebody else's there, `prelude-serve` nobody's, and pip runs code of what it installs."""
    from_index = re.compile(
        r"\bprelude(-serve)?\[\w+\](?! @)|pip3? install[^\n`]*[ '\"]prelude(-serve)?(?![\w-]|(\[\w+\])? @)"
    )
    assert from_index.search("pip install -U prelude")
    assert from_index.search("pip install 'prelude-serve[train]'")
    assert not from_index.search(
        "pip install 'prelude-serve[train] @ file:///srv/prelude_serve-0.1.0-py3-none-any.whl'"
    )
    files = [path for top in TOPS for path in (ROOT / top).rglob("*") if path.suffix in (*SOURCE_SUFFIXES, ".yaml")]
    files += [path for path in ROOT.iterdir() if path.is_file()]
    told = {path: from_index.findall(path.read_text(errors="replace")) for path in files if path != Path(__file__)}
    assert {path: found for path, found in told.items() if found} == {}


def test_the_readme_counts_the_hooks():
    num_cpu, num_gpu = (sum(hook.platform is each for hook in HOOKS) for each in (Platform.CPU, Platform.GPU))
    words = f"installs {len(HOOKS)} small hooks ({num_cpu} for CPU engines only, {num_gpu} for GPUs only)"
    text = " ".join(text_of("README.md").split())
    assert words in text
    assert f"SGLang {SGLANG_VERSION}" in text


def test_the_doctors_line_counts_the_hooks():
    on_cpu = {hook.name for role in ("prefill", "decode", "unified") for hook in hooks_for(role, "cpu")}
    assert f"all {len(on_cpu)} hooks of cpu engines" in text_of("docs/workers.md")


def test_the_layout_names_every_room_in_the_order_of_the_layers():
    (block,) = [text for _, text in blocks_of(section("docs/architecture.md", "Layout"))]
    named = [line.split()[0].rstrip("/") for line in block.splitlines()]
    tree = ast.parse((ROOT / "tests" / "unit" / "test_import_rules.py").read_text())
    (layers,) = (
        node.value.func.value.func.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and node.targets[0].id == "LAYERS"
    )
    packages = list(dict.fromkeys(room.partition(".")[0] for room in layers.split()))
    order = [name for name in named if "/" not in name][::-1]
    assert sorted(order) == sorted(packages)
    heights = {package: height for height, package in enumerate(packages)}
    heights["decode_worker"] = heights["prefill_worker"]  # beside each other
    assert [heights[name] for name in order] == sorted(heights[name] for name in order)
    rooms = {
        path.parent.relative_to(ROOT).as_posix() for package in packages for path in ROOT.glob(f"{package}/*/*.py")
    }
    assert {name for name in named if "/" in name} == rooms


def test_every_decision_is_in_the_index():
    folder = ROOT / "docs" / "decisions"
    records = {path.name: path.read_text().splitlines()[0] for path in folder.glob("0*.md")}
    index = re.findall(r"^\| (\d+) \| \[(.*)\]\((.*)\) \|$", (folder / "README.md").read_text(), re.MULTILINE)
    assert {name: f"# {number}. {title}" for number, title, name in index} == records
    numbers = [int(number) for number, _, _ in index]
    assert numbers == sorted(set(numbers))
    for name in records:
        text = (folder / name).read_text()
        assert [part in text for part in ("**Context.**", "**Decision.**", "**Consequences.**")] == [True] * 3, name
