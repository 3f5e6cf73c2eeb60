"""Body of the hook into compiled grammars. SGLang, and the compiler in it, keep each one for good.

It also keeps out of the grammars of tool calls what belongs to none: whitespace, and text after required calls.
"""

import json
import os
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from typing import Any

MAX_GRAMMARS = 256
MAX_BYTES = 256 * 1024**2  # of one scheduler's grammars; the compiler keeps as much of their parts
COMPILATIONS = 2  # at a time; others wait in order
_MIN_BYTES = 16 * 1024  # that any grammar counts for, also one that failed to compile


class CompiledGrammars(OrderedDict[Any, Any]):
    """Compiled grammars by key, the least recently used first, within bounds on their number and bytes.

    In place of SGLang's dict. A grammar that is in use lives on outside of it. A copy is not made of what is returned:
    the backend copies.
    """

    def __init__(self, *, max_grammars: int = MAX_GRAMMARS, max_bytes: int = MAX_BYTES) -> None:
        super().__init__()
        self._max_grammars, self._max_bytes = max_grammars, max_bytes
        self._sizes: dict[Any, int] = {}
        self._num_bytes = 0

    def get(self, key: Any, default: Any = None) -> Any:
        if key not in self:
            return default
        self.move_to_end(key)
        return self[key]

    def __setitem__(self, key: Any, grammar: Any) -> None:
        size = max(_MIN_BYTES, _num_bytes(grammar)) + sum(map(len, key))
        self._num_bytes += size - self._sizes.pop(key, 0)
        self._sizes[key] = size
        super().__setitem__(key, grammar)
        self.move_to_end(key)
        while self and (len(self) > self._max_grammars or self._num_bytes > self._max_bytes):
            oldest, _ = self.popitem(last=False)
            self._num_bytes -= self._sizes.pop(oldest)

    def clear(self) -> None:
        super().clear()
        self._sizes.clear()
        self._num_bytes = 0


def keep_the_latest(_result: None, manager: Any, *_args: Any) -> None:
    """Give the grammar backends of a new manager bounded caches, few threads, and a compiler of ours."""
    backend = manager.grammar_backend
    while backend is not None:  # the one for reasoning models wraps another
        backend.cache = CompiledGrammars()
        backend.executor.shutdown(wait=False)
        backend.executor = ThreadPoolExecutor(COMPILATIONS, thread_name_prefix="grammar")
        if hasattr(backend, "grammar_compiler"):
            backend.grammar_compiler = compiler_for(backend._tokenizer_info)
        backend = getattr(backend, "grammar_backend", None)


def compiler_for(tokenizer_info: Any) -> Any:
    """xgrammar's, with a bounded cache, as many threads as half the cores, and tool calls without whitespace."""
    from xgrammar import GrammarCompiler

    class Compiler(GrammarCompiler):
        def compile_structural_tag(self, *args: Any, **kwargs: Any) -> Any:
            return super().compile_structural_tag(without_whitespace(*args, **kwargs))

    threads = max(1, min(8, (os.cpu_count() or 2) // 2))
    return Compiler(tokenizer_info, max_threads=threads, cache_limit_bytes=MAX_BYTES)


def _num_bytes(grammar: Any) -> int:
    """Of a compiled grammar, also one in the wrapper for reasoning models."""
    compiled = getattr(grammar, "ctx", None) or getattr(getattr(grammar, "grammar", None), "ctx", None)
    return int(getattr(compiled, "memory_size_bytes", 0))


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
