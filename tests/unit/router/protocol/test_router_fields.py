"""The fields and the address that the router knows engines by, compared with the source of the pinned engine."""

import ast
import importlib.util
from pathlib import Path

import pytest
from support.routers.engine_fields import ENGINE_INTERNAL

from cluster.config.workers import NOBODY
from router.protocol.fields import BOOKKEEPING
from router.protocol.rules import RULES

_SPEC = importlib.util.find_spec("sglang")  # finds it without importing it
SGLANG = Path(_SPEC.origin).parent / "srt"
PROTOCOL = "entrypoints/openai/protocol.py"


def declared(path: str, class_name: str) -> list[str]:
    """The annotated names of a class and then of its bases in the same file."""
    classes = {
        node.name: node for node in ast.parse((SGLANG / path).read_text()).body if isinstance(node, ast.ClassDef)
    }
    found: list[str] = []
    names = [class_name]
    while names:
        node = classes[names.pop()]
        names += [base.id for base in node.bases if isinstance(base, ast.Name) and base.id in classes]
        fields = [each.target for each in node.body if isinstance(each, ast.AnnAssign)]
        found += [each.id for each in fields if isinstance(each, ast.Name) and each.id[0] != "_"]
    return [name for name in found if name != "model_config"]


def test_every_field_of_the_engine_is_classified() -> None:
    fields = {*declared(PROTOCOL, "CompletionRequest"), *declared(PROTOCOL, "ChatCompletionRequest")}
    assert fields == RULES.keys() - BOOKKEEPING - {"reasoning", "adapter", "adapter_scale"} | ENGINE_INTERNAL


def test_nobody_is_the_host_that_ends_a_request_at_the_prefill_engine() -> None:
    source = (SGLANG / "disaggregation/utils.py").read_text()
    assert f'FAKE_BOOTSTRAP_HOST = "{NOBODY}"' in source


@pytest.mark.parametrize("name", ["ChatCompletionStreamResponse", "CompletionStreamResponse"])
def test_events_of_sglang_end_with_their_usage(name: str) -> None:
    """`sglext` comes in an event of its own, and is left out of others."""
    assert declared(PROTOCOL, name)[-3:] == ["choices", "usage", "sglext"]
