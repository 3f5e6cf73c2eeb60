"""Keeps out of the grammars of tool calls what belongs to none: whitespace, and text after required calls."""

from __future__ import annotations

import json
from typing import Any


def without_whitespace(tag: Any) -> Any:
    """A structural tag whose JSON is spaced as `json.dumps` does it.

    A tag has no option for that: xgrammar takes any whitespace between the tokens of its JSON, from which a small model
    may not return. Its compiler of schemas does have one, so each schema is replaced by the grammar that it makes.
    """
    if isinstance(tag, str):
        return _with_grammars(json.loads(tag))
    tree = json.loads(tag.model_dump_json())
    tree["format"] = _without_text(tree["format"])
    return _with_grammars(tree)


def _without_text(form: dict[str, Any]) -> dict[str, Any]:
    """The calls that an answer must have, and nothing else.

    SGLang makes tags, of which there is `at_least_one`, of calls that are required. xgrammar takes any text after the
    first, which SGLang drops: a model that goes on writes until the length limit.
    """
    if form["type"] != "triggered_tags" or not form["at_least_one"]:
        return form
    return {"type": "tags_with_separator", "tags": form["tags"], "separator": "\n", "at_least_one": True}


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
