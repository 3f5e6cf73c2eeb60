"""Generates the page docs/sglang-hooks.md from the ledger: `python -m engine.hooks.table > docs/sglang-hooks.md`."""

from engine.hooks.hook import Hook, Platform
from engine.hooks.ledger import GROUPS
from engine.pin import SGLANG_VERSION

_HEAD = f"""# What Prelude changes in SGLang

Generated from `engine/hooks/ledger/` by `python -m engine.hooks.table`. The pin is SGLang {SGLANG_VERSION}.

Prelude is a plugin (entry point `sglang.srt.plugins`) that installs these hooks in each process of an engine, verifies
them, or exits ([decision 9](decisions/0009-sglang-by-plugin-with-proven-hooks.md)).

CPU and GPU: installed on such engines only. [Patches for SGLang](upstream/README.md).
[How the pin moves](engine-upgrade.md).

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
