"""Generates the page docs/sglang-hooks.md from the ledger: `python -m engine.hooks.table > docs/sglang-hooks.md`."""

from __future__ import annotations

from engine.hooks.hook import Hook, Platform
from engine.hooks.ledger import GROUPS
from engine.pin import SGLANG_VERSION


def table() -> str:
    """The page, in Markdown."""
    lines = [
        "# What Prelude changes in SGLang",
        "",
        "Generated from `engine/hooks/ledger/` by `python -m engine.hooks.table`.",
        f"The pin is SGLang {SGLANG_VERSION}.",
        "",
        "Prelude patches no file. It is a plugin (entry point `sglang.srt.plugins`) that installs these hooks in each",
        "process of an engine. Before it applies a hook it compares the digest of the target's source with the digest",
        "in the ledger; afterwards it verifies that the target carries the hook. On any mismatch the process exits. A",
        "worker is ready only when its server and every scheduler have reported the full set.",
        "",
        "Kinds: `around` and `after` go through SGLang's hook registry; `global` replaces one module-level name in",
        "that module only. Hooks are grouped by what SGLang lacks.",
    ]
    for group in GROUPS:
        lines += [
            "",
            f"## {group.lacking}",
            "",
            f"- Upstream: {group.upstream}.",
            f"- Remove when {group.remove_when}.",
        ]
        for hook in group.hooks:
            lines += ["", *_entry(hook)]
    return "\n".join(lines) + "\n"


def _entry(hook: Hook) -> list[str]:
    platform = {Platform.ANY: "CPU and GPU", Platform.CPU: "CPU only", Platform.GPU: "GPU only"}[hook.platform]
    return [
        f"### `{hook.name}`",
        "",
        "| | |",
        "|---|---|",
        f"| Target | `{hook.target}` |",
        f"| Kind, roles, platform | {hook.kind.value}; {', '.join(sorted(hook.roles))}; {platform} |",
        f"| Why | {hook.why} |",
        f"| Source digest | `{hook.source_sha256[:16]}` |",
    ]


if __name__ == "__main__":
    print(table(), end="")
