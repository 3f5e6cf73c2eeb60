"""The router imports adapters/, so its core must stay free of torch, transformers and sglang."""

import subprocess
import sys
from pathlib import Path

from prelude import adapters
from prelude.adapters import errors

ROOT = Path(adapters.__file__).parent
NEEDS_TORCH = {"verification.reference", "formats.pickle_conversion"}
FILES = sorted(ROOT.rglob("*.py"))
CORE = [
    name for path in FILES
    if (name := ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")) not in NEEDS_TORCH
]  # fmt: skip


def test_the_core_imports_no_torch():
    modules = ", ".join(f"prelude.adapters.{name}" for name in CORE if name != "__init__")
    heavy = ("torch", "transformers", "sglang", "peft", "pydantic")
    code = f"import sys, {modules}; print([name for name in {heavy} if name in sys.modules])"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT.parents[1], capture_output=True, text=True, timeout=60
    )
    assert result.stdout.strip() == "[]", result.stderr


def test_every_error_says_how_it_is_answered():
    classes = [
        each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, errors.AdapterError)
    ]
    assert len({each.code for each in classes}) == len(classes)
    for each in classes:
        assert 400 <= each.http_status < 600
        assert isinstance(each.retryable, bool)
        assert each.__name__ in errors.__doc__
