"""Body of the hook that keeps whitespace out of the JSON of structural tags, such as the calls of tools."""

from __future__ import annotations

import json
from typing import Any


def leave_out_whitespace(original: Any, compiler: Any, tag: Any) -> Any:
    """Compile a structural tag whose JSON is spaced as `json.dumps` does it.

    A tag has no option for that: xgrammar takes any whitespace between the tokens of its JSON. Its compiler of schemas
    does have one, so each schema is replaced by the grammar that it makes.
    """
    text = tag if isinstance(tag, str) else tag.model_dump_json()
    return original(compiler, _with_grammars(json.loads(text)))


def _with_grammars(node: Any) -> Any:
    from xgrammar import Grammar

    if isinstance(node, list):
        return [_with_grammars(each) for each in node]
    if not isinstance(node, dict):
        return node
    if "json_schema" not in node:
        return {key: _with_grammars(value) for key, value in node.items()}
    if node.get("type") != "json_schema" or node.get("style", "json") != "json":
        return node  # parameters as XML
    grammar = Grammar.from_json_schema(json.dumps(node["json_schema"]), any_whitespace=False)
    return {"type": "grammar", "grammar": str(grammar)}
