"""Generates the page docs/sglang-hooks.md from the ledger: `python -m engine.hooks.table > docs/sglang-hooks.md`."""

from __future__ import annotations

from engine.hooks.hook import Hook, Platform
from engine.hooks.ledger import GROUPS
from engine.pin import SGLANG_VERSION

_HEAD = f"""# What Prelude changes in SGLang

Generated from `engine/hooks/ledger/` by `python -m engine.hooks.table`. The pin is SGLang {SGLANG_VERSION}.

Prelude patches no file. It is a plugin (entry point `sglang.srt.plugins`) that installs these hooks in each process
of an engine. A hook translates arguments, calls our code and calls the original; none contains a copy of SGLang's
code.

Before a hook is applied, the release, the target and the digest of its source are compared with the ledger;
afterwards the target is verified to carry the hook. On any mismatch the process exits. A worker is ready only when
its server and every scheduler have reported the full set. `tests/engine/test_hooks.py` shows for each hook what the
target does without it and with it.

To move the pin: change `engine/pin.py` and `requirements/`, run that test, read SGLang's changes of each target
whose digest differs, update the ledger, and remove the hooks whose `remove_when` holds. The ledger has each hook's
reason, kind, roles and digest, and what SGLang has instead. CPU and GPU: installed on such engines only.

| what SGLang lacks | hooks, and their targets |
|---|---|
"""


def table() -> str:
    """The page, in Markdown."""
    return _HEAD + "".join(f"| {group.lacking} | {', '.join(map(_named, group.hooks))} |\n" for group in GROUPS)


def _named(hook: Hook) -> str:
    platform = {Platform.ANY: "", Platform.CPU: ", CPU", Platform.GPU: ", GPU"}[hook.platform]
    target = ".".join(hook.target.split(".")[-2:])
    return f"`{hook.name}` (`{target}`{platform})"


if __name__ == "__main__":
    print(table(), end="")
