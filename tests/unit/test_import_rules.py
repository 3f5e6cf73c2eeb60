"""Who may import whom (docs/architecture.md, "Layout")."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("adapters", "engine", "prefill_worker", "decode_worker", "router", "cluster", "bench")

# package: top-level names that none of its modules may import, anywhere
FORBIDDEN = {
    "adapters": {"sglang", "router", "engine", "cluster", "prefill_worker", "decode_worker", "bench"},
    "router": {"torch", "sglang", "transformers", "engine", "prefill_worker", "decode_worker", "bench"},
    "cluster": {"sglang"},
    "prefill_worker": {"sglang", "router", "decode_worker"},
    "decode_worker": {"sglang", "router", "prefill_worker", "torch"},
    "engine": {"router", "prefill_worker", "decode_worker", "bench"},
    "bench": {"sglang"},
}


def imports(path: Path) -> set[str]:
    """Top-level names that a module imports, lazily or not."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.split(".")[0])
    return names


@pytest.mark.parametrize("package", FORBIDDEN)
def test_no_forbidden_import(package: str):
    for path in (ROOT / package).rglob("*.py"):
        broken = imports(path) & FORBIDDEN[package]
        assert not broken, f"{path.relative_to(ROOT)} imports {', '.join(sorted(broken))}"


def test_sglang_is_imported_in_engine_only():
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            assert package == "engine" or "sglang" not in imports(path), path


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("router.server", ("torch", "sglang", "transformers")),
        ("prefill_worker.agent", ("sglang", "torch", "transformers")),
        ("prefill_worker.unified_agent", ("sglang", "torch", "transformers")),
        ("decode_worker.agent", ("sglang", "torch", "transformers")),
    ],
)
def test_a_process_does_not_load_what_it_does_not_need(module: str, absent: tuple[str, ...]):
    """Also not by way of somebody else."""
    code = f"import sys, {module}; sys.exit(', '.join(n for n in {absent!r} if n in sys.modules) or 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_every_package_is_covered():
    assert {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"tests"} <= set(PACKAGES)
