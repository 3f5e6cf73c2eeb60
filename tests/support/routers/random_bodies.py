"""Random requests, half of them damaged: what the admission contract is tested with."""

import random
import string
from typing import Any

from support.routers.engine_fields import ENGINE_INTERNAL

from router.protocol.fields import NOT_OFFERED
from router.protocol.messages import TEMPLATE_KWARGS
from router.protocol.rules import BOOLEANS, INTEGERS, NUMBERS, RULES

FIELDS = sorted(RULES.keys() | ENGINE_INTERNAL | NOT_OFFERED.keys())
REGEXES = (
    "[a-z]+", "(a|b){1,3}c", r"\d{2}-\d{2}", "([a-z]+,)*", "([a-z]+)+", "(", "a{3,1}", ".*x.*y", "(?=a)b", "", "\0a",
)  # fmt: skip


class Bodies:
    """Random requests."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._makers = {
            **dict.fromkeys(INTEGERS, self._integer),
            **{name: lambda bounds=bounds: self._random.uniform(*bounds[:2]) for name, bounds in NUMBERS.items()},
            **dict.fromkeys(BOOLEANS, lambda: self._random.random() < 0.5),
            "stop": lambda: [self._text() for _ in range(self._random.randrange(4))] or self._text(),
            "stop_token_ids": self._ids,
            "logit_bias": lambda: {str(self._random.randrange(700)): self._random.uniform(-100, 100) for _ in range(5)},
            "regex": lambda: self._random.choice(REGEXES),
            "response_format": self._format,
            "tools": lambda: [self._tool() for _ in range(self._random.randrange(3))],
            "tool_choice": lambda: self._random.choice(("auto", "none", "required", self._tool())),
            "chat_template_kwargs": lambda: {self._random.choice(sorted(TEMPLATE_KWARGS)): self._scalar()},
            "reasoning_effort": lambda: self._random.choice(("low", "none", 0.5, "max")),
            "logprobs": lambda: self._random.choice((True, False, 0, 1, 5)),
            "top_logprobs": lambda: self._random.randrange(6),
            "n": lambda: self._random.choice((1, 1, 2, 3)),
            "adapter": lambda: self._random.choice(("a0", "a1", "zero")),
            "user": self._text,
        }

    def request(self) -> tuple[str, dict[str, Any]]:
        """Path and body."""
        is_chat = self._random.random() < 0.5
        body: dict[str, Any] = {"model": "demo", "max_tokens": self._random.randrange(1, 5)}
        body |= {"messages": self._messages()} if is_chat else {"prompt": self._prompt()}
        for name in self._random.sample(sorted(self._makers), self._random.randrange(5)):
            body[name] = self._makers[name]()
        if body.get("stream_options") is None and body.get("stream") is True and self._random.random() < 0.5:
            body["stream_options"] = {"include_usage": True}
        if self._random.random() < 0.5:
            self._damage(body)
        return "chat/completions" if is_chat else "completions", body

    def _damage(self, body: dict[str, Any]) -> None:
        """Put something wrong at some depth."""
        node: Any = body
        while self._random.random() < 0.6:
            values = node.values() if isinstance(node, dict) else node
            inner = [each for each in values if isinstance(each, (dict, list))]
            if not inner:
                break
            node = self._random.choice(inner)
        junk = self._junk(3)
        if isinstance(node, dict):
            node[self._random.choice((*FIELDS, *node, self._text()))] = junk
        else:
            node.insert(self._random.randrange(len(node) + 1), junk)

    def _junk(self, depth: int) -> Any:
        kind = self._random.randrange(10 if depth else 7)
        if kind < 7:
            return (None, True, -1, 10**30, 1e300, self._text(), "LoRA adapters are not loaded")[kind]
        if kind == 7:
            return [self._junk(depth - 1) for _ in range(self._random.randrange(4))]
        return {self._random.choice((*FIELDS, self._text())): self._junk(depth - 1) for _ in range(3)}

    def _integer(self) -> int:
        return self._random.choice((0, 1, 2, 7, 50))

    def _text(self) -> str:
        alphabet = string.ascii_letters + ' {}[]"\\\n\0é中\U0001f600'
        return "".join(self._random.choices(alphabet, k=self._random.randrange(20)))

    def _scalar(self) -> Any:
        return self._random.choice((True, False, 1, 0.5, "x", None))

    def _ids(self) -> list[int]:
        return [self._random.randrange(600) for _ in range(self._random.randrange(1, 20))]

    def _prompt(self) -> Any:
        return self._random.choice((self._text() or "a", self._ids(), [self._text() or "b", "c"], [self._ids()]))

    def _messages(self) -> list[Any]:
        content = self._random.choice((self._text(), [{"type": "text", "text": self._text()}]))
        found: list[Any] = [{"role": self._random.choice(("user", "system")), "content": content}]
        if self._random.random() < 0.3:
            function = {"name": "f", "arguments": self._random.choice(("{}", "x"))}
            called = {"id": "c", "type": "function", "function": function}
            found += [{"role": "assistant", "content": None, "tool_calls": [called]}]
            found += [{"role": "tool", "tool_call_id": "c", "content": self._text()}]
        return found

    def _schema(self, depth: int) -> dict[str, Any]:
        kind = self._random.choice(("string", "integer", "boolean", "null", "object", "array", "nonsense"))
        schema: dict[str, Any] = {"type": kind}
        if kind == "object" and depth:
            schema["properties"] = {name: self._schema(depth - 1) for name in self._random.sample("abcd", 2)}
            schema["required"] = self._random.choice((["a"], [], "a"))
        elif kind == "array" and depth:
            schema["items"] = self._schema(depth - 1)
        elif kind == "string":
            pattern = self._random.choice(REGEXES)
            schema |= self._random.choice(({}, {"maxLength": 3}, {"pattern": pattern}, {"enum": ["a"]}))
        return schema

    def _format(self) -> dict[str, Any]:
        kind = self._random.choice(("text", "json_object", "json_schema", "structural_tag", "x"))
        form: dict[str, Any] = {"type": kind}
        if kind == "json_schema":
            whole = {"json_schema": {"name": "x", "schema": self._schema(2)}}
            form |= self._random.choice((whole, {"schema": self._schema(1)}, {}))
        return form

    def _tool(self) -> dict[str, Any]:
        function = {"name": self._random.choice("fg"), "description": self._text(), "parameters": self._schema(2)}
        return {"type": "function", "function": function}
