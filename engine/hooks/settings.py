"""The settings of an engine as SGLang has resolved them."""

from __future__ import annotations

from typing import Any


class ResolvedSettings:
    """Reads each setting by its name in `ServerArgs`, which itself has only what the command line said.

    Raises AttributeError for a name that SGLang does not have (any longer).
    """

    def __getattr__(self, name: str) -> Any:
        from sglang.srt.arg_groups.arg_utils import namespace_of
        from sglang.srt.runtime_context import get_context

        context = get_context()
        path = namespace_of(type(context.server_args)).get(name)
        if path is None:
            return getattr(context.server_args, name)
        top, *rest = path.split(".")
        found: Any = context.config_bag(top)
        for part in (*rest, name):
            found = getattr(found, part)
        return found
