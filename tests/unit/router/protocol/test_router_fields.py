"""The fields and the address that the router knows engines by, compared with the source of the pinned engine."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

from support.routers.engine_fields import ENGINE_INTERNAL

from router.generation.engine_bodies import NOBODY
from router.protocol.fields import BOOKKEEPING
from router.protocol.rules import RULES

_SPEC = importlib.util.find_spec("sglang")  # finds it without importing it
assert _SPEC is not None
assert _SPEC.origin is not None
SGLANG = Path(_SPEC.origin).parent / "srt"


def declared(path: str, class_name: str) -> set[str]:
    """The annotated names of a class and of its bases in the same file."""
    classes = {
        node.name: node for node in ast.parse((SGLANG / path).read_text()).body if isinstance(node, ast.ClassDef)
    }
    found: set[str] = set()
    names = [class_name]
    while names:
        node = classes[names.pop()]
        names += [base.id for base in node.bases if isinstance(base, ast.Name) and base.id in classes]
        found |= {
            each.target.id
            for each in node.body
            if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name) and each.target.id[0] != "_"
        }
    return found - {"model_config"}


def test_every_field_of_the_engine_is_classified() -> None:
    protocol = "entrypoints/openai/protocol.py"
    fields = declared(protocol, "CompletionRequest") | declared(protocol, "ChatCompletionRequest")
    assert fields == RULES.keys() - BOOKKEEPING - {"reasoning", "adapter"} | ENGINE_INTERNAL


def test_nobody_is_the_host_that_ends_a_request_at_the_prefill_engine() -> None:
    source = (SGLANG / "disaggregation/utils.py").read_text()
    assert f'FAKE_BOOTSTRAP_HOST = "{NOBODY}"' in source
