"""Holds requests and answers against the router's OpenAPI document."""

from __future__ import annotations

import json
import re
from functools import cached_property
from typing import Any

import jsonschema

from router.api.openapi import document
from router.protocol.field_values import Limits


class Described:
    """The document of a router with these limits. Every check raises AssertionError."""

    def __init__(self, limits: Limits, paths_key: str = "paths") -> None:
        self._limits = limits
        self._paths_key = paths_key
        self.document = document(limits, "0")
        # A name may contain slashes, so paths that end in a verb come first, as in the router.
        paths = sorted(self.document[paths_key], key=lambda path: -len(re.sub(r"\{\w+\}", "", path)))
        self._paths = [(re.compile(re.sub(r"\\\{\w+\\\}", ".+", re.escape(path)), re.DOTALL), path) for path in paths]

    @cached_property
    def admin(self) -> Described:
        """The same for the admin listener."""
        return Described(self._limits, "x-admin-paths")

    def operation(self, method: str, path: str) -> dict[str, Any] | None:
        """What the document says of a request, None if there is no such path or method."""
        for pattern, name in self._paths:
            if pattern.fullmatch(path) and method.lower() in self.document[self._paths_key][name]:
                return self.document[self._paths_key][name][method.lower()]
        return None

    def errors(self, schema: dict[str, Any], value: Any) -> list[str]:
        """Why a value is not what a schema says."""
        whole = {**schema, "components": self.document["components"]}
        found = jsonschema.Draft202012Validator(whole).iter_errors(value)
        return [f"{error.json_path}: {error.message[:200]}" for error in found]

    def request_errors(self, name: str, fields: dict[str, Any]) -> list[str]:
        """As `errors`, for a request of this schema."""
        return self.errors({"$ref": f"#/components/schemas/{name}"}, fields)

    def check(self, method: str, path: str, status: int, media_type: str, body: bytes, fields: Any = None) -> None:
        """An answer is as described; and a request with JSON `fields` that was answered with 200, too."""
        operation = self.operation(method, path)
        if operation is None:
            assert status in (404, 405), f"{method} {path} is not in the document and was answered with {status}"
            return
        responses = operation["responses"]
        described = responses.get(str(status)) or responses[f"{status // 100}XX"]
        content = described["content"]
        media_type = media_type.partition(";")[0]
        assert media_type in content, f"{method} {path}: {media_type} is not in {list(content)}"
        schema = content[media_type].get("schema")
        if schema is not None:
            events = media_type == "text/event-stream"
            for data in _events(body) if events else [body]:
                value = json.loads(data)
                is_error = events and "error" in value
                errors = self.errors({"$ref": "#/components/schemas/Error"} if is_error else schema, value)
                assert not errors, f"{method} {path}, {status}: {errors}"
        asked = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
        if asked is not None and fields is not None and status == 200:
            errors = self.errors(asked, fields)
            assert not errors, f"{method} {path} takes what the document does not: {errors}"


def _events(body: bytes) -> list[bytes]:
    data = [event[event.index(b"data: ") + 6 :] for event in body.split(b"\n\n") if event]
    return [each for each in data if each != b"[DONE]"]
