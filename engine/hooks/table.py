"""Writes the ledger as the page docs/sglang-hooks.md: `python -m engine.hooks.table > docs/sglang-hooks.md`."""

from __future__ import annotations

from engine.hooks.hook import Hook, Platform
from engine.hooks.ledger import HOOKS
from engine.pin import SGLANG_VERSION


def table() -> str:
    """The page, in Markdown."""
    lines = [
        "# What Prelude changes in SGLang",
        "",
        "Generated from `engine/hooks/ledger.py` by `python -m engine.hooks.table`.",
        f"The pin is SGLang {SGLANG_VERSION}.",
        "",
        "Prelude patches no file. It is a plugin (entry point `sglang.srt.plugins`) that installs the hooks below in",
        "each process of an engine. Before it applies one it compares the digest of the target's source with the one",
        "that the hook was written for; afterwards it proves that the target is ours. On any mismatch the process",
        "exits, and a worker is ready only when its server and every scheduler have reported the full set.",
        "",
        "Kinds: `around` and `after` go through SGLang's hook registry; `global` replaces one module-level name in",
        "that module only.",
    ]
    for hook in HOOKS:
        lines += ["", *_entry(hook)]
    return "\n".join(lines) + "\n"


def _entry(hook: Hook) -> list[str]:
    where = {Platform.ANY: "CPU and GPU", Platform.CPU: "CPU only", Platform.GPU: "GPU only"}[hook.platform]
    return [
        f"## `{hook.name}`",
        "",
        "| | |",
        "|---|---|",
        f"| Target | `{hook.target}` |",
        f"| Kind, roles, platform | {hook.kind.value}; {', '.join(sorted(hook.roles))}; {where} |",
        f"| Why | {hook.why} |",
        f"| Upstream | {hook.upstream} |",
        f"| Remove when | {hook.remove_when} |",
        f"| Source digest | `{hook.source_sha256[:16]}` |",
    ]


if __name__ == "__main__":
    print(table(), end="")
