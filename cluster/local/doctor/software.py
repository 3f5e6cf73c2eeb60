"""Probes of Python, the SGLang pin, Prelude's hooks, and what NIXL will move KV over."""

import importlib.metadata
import json
import platform
import sys
from collections.abc import Iterator
from pathlib import Path

from cluster.local.doctor.finding import Finding, error, ok, warning
from cluster.local.doctor.host import Host
from engine.kv_probe import DONE, transports_in
from engine.pin import SGLANG_VERSION

HOOKS_S = 240.0  # importing SGLang on a busy machine
TRANSFER_S = 60.0
_FOR_GPUS = ("torchvision", "sglang-kernel")
_WRONG_PLUGIN_FILTER = "unset SGLANG_PLUGINS: it keeps Prelude's plugin out of SGLang"


def python() -> Iterator[Finding]:
    text = f"Python {platform.python_version()} on {platform.system()} {platform.machine()}"
    if platform.system() != "Linux":
        yield error(text, "engines run on Linux only")
    else:
        yield ok(text)


def packages(host: Host, *, device: str) -> Iterator[Finding]:
    """SGLang at the pin, its plugin entry point, and what engines of this device import first. Imports none of them."""
    found = _version("sglang")
    if found != SGLANG_VERSION:
        yield error(f"SGLang {found or 'is not installed'}; the hooks are verified for {SGLANG_VERSION}", _reinstall())
    else:
        yield ok(f"SGLang {found}, the pinned release")
    plugins = [each.value for each in importlib.metadata.entry_points(group="sglang.srt.plugins")]
    if "engine.plugin:load" not in plugins:
        yield error("SGLang does not see Prelude's plugin", "install Prelude itself: `pip install --no-deps -e .`")
    chosen = host.environment.get("SGLANG_PLUGINS")
    if chosen is not None and "prelude" not in chosen.split(","):
        yield error(f"SGLANG_PLUGINS={chosen}", _WRONG_PLUGIN_FILTER)
    for name in ("torch", "nixl", *(_FOR_GPUS if device == "cuda" else ())):
        version = _version(name)
        if not version:
            yield error(f"{name} is not installed", _reinstall(device))
        elif device == "cuda" and name == "torch" and version.endswith("+cpu"):
            yield error(f"torch {version} has no CUDA, and cluster.yaml says `device: cuda`", _reinstall(device))
        else:
            yield ok(f"{name} {version}")


# As an engine of this device imports SGLang, in a process of its own.
_LEDGER = """
import json, sys
if sys.argv[1] == "cpu":
    from engine import cpu_support
    cpu_support.install()
from engine.hooks.installation import source_sha256
from engine.hooks.ledger import hooks_for
hooks = {hook.name: hook for role in ("prefill", "decode", "unified") for hook in hooks_for(role, sys.argv[1])}
wrong = []
for hook in hooks.values():
    try:
        is_right = source_sha256(hook) == hook.source_sha256
    except Exception as failure:
        is_right = False
        print(f"{hook.name}: {type(failure).__name__}: {failure}")
    if not is_right:
        wrong.append(hook.name)
print("LEDGER", json.dumps([len(hooks), wrong]))
"""


def hooks(host: Host, *, device: str) -> Iterator[Finding]:
    """Whether the targets of all hooks of this device are those of the ledger."""
    status, output = host.run(sys.executable, "-c", _LEDGER, device, timeout_s=HOOKS_S - 5)
    answer = next((line[7:] for line in output.splitlines() if line.startswith("LEDGER ")), "")
    if not answer:
        reason = output.strip().splitlines()[-1][:300] if output.strip() else f"exit status {status}"
        yield error(f"the hooks cannot be compared with SGLang: {reason}", _reinstall())
        return
    count, wrong = json.loads(answer)
    if wrong:
        yield error(f"{len(wrong)} of {count} hooks do not fit this SGLang: {', '.join(wrong[:8])}", _reinstall())
    else:
        yield ok(f"all {count} hooks of {device} engines fit this SGLang")


def transfer(host: Host, *, device: str) -> Iterator[Finding]:
    """The transports that two NIXL agents choose here."""
    status, output = host.run(sys.executable, "-m", "engine.kv_probe", device, timeout_s=TRANSFER_S - 5)
    if DONE not in output.splitlines():
        reason = output.strip().splitlines()[-1][:300] if output.strip() else f"exit status {status}"
        yield error(f"NIXL cannot move KV between two processes: {reason}", _reinstall())
        return
    transports = transports_in(output)
    lanes = ", ".join(transports) or "what its log does not name"
    if device == "cuda" and not any("cuda" in each for each in transports):
        yield warning(
            f"UCX moves KV over {lanes}, and does not use CUDA IPC",
            "start containers with --ipc host and all GPUs visible, and leave UCX_TLS unset",
        )
    else:
        yield ok(f"UCX moves KV within this host over {lanes}")
    if value := host.environment.get("UCX_TLS"):
        yield warning(f"UCX_TLS={value} restricts the transports", "unset it, unless that is meant")


def _reinstall(device: str = "cpu") -> str:
    """The remedy, for the environment that runs, or for engines on GPUs."""
    if device == "cuda" and Path(sys.prefix).name == ".venv":
        return "run .venv-gpu/bin/prelude, after `make setup-gpu`; or set `engine: {device: cpu}`"
    target = "setup-gpu" if Path(sys.prefix).name == ".venv-gpu" else "setup"
    return f"install the locked requirements again: `make {target}`"


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""
