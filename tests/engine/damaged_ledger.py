# ruff: noqa: E402 the environment and the CPU support come first
"""Loads the plugin with an error in the ledger, once for each damage named: ROLE FOLDER DAMAGE...

Each has a forked process of its own, so that SGLang is imported once. Prints the exit codes and what they wrote to
standard error, as JSON; a process that does not detect the damage exits with 99.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path

role, folder, *damages = sys.argv[1:]
os.environ["PRELUDE_ENGINE_ROLE"], os.environ["PRELUDE_ENGINE_DEVICE"] = role, "cpu"
os.environ["PRELUDE_ENGINE_REPORTS"] = folder

from engine import cpu_support

cpu_support.install()

import sglang.srt.managers.scheduler  # noqa: F401 with what most hooks are on
from sglang.srt.plugins import hook_registry, load_plugins

from engine.hooks import installation, ledger


def load_damaged(damage: str) -> None:
    first, *rest = ledger.HOOKS
    damaged = first
    if damage == "source":
        damaged = dataclasses.replace(first, source_sha256="0" * 64)
    elif damage == "target":
        damaged = dataclasses.replace(rest[0], target="sglang.srt.lora.lora_manager.LoRAManager.no_such_method")
    elif damage == "module":
        damaged = dataclasses.replace(rest[0], target="sglang.no_such_module.Class.method")
    elif damage == "version":
        installation.SGLANG_VERSION = "0.0.1"
    elif damage == "untaken":  # the registry only logs what it cannot apply
        hook_registry.HookRegistry._apply_target = classmethod(lambda *_: None)
    else:
        raise ValueError(damage)
    ledger.HOOKS = (damaged, *rest)
    load_plugins()


outcomes = {}
for damage in damages:
    errors = Path(folder, f"{damage}.txt")
    child = os.fork()
    if child == 0:
        os.dup2(os.open(errors, os.O_CREAT | os.O_WRONLY, 0o600), 2)
        code: object = 98  # of an exception, which would not end an engine either
        try:
            load_damaged(damage)
            code = 99
        except SystemExit as end:
            print(end, file=sys.stderr, flush=True)
            code = 1 if isinstance(end.code, str) else end.code
        finally:
            os._exit(int(code or 0))
    outcomes[damage] = (os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), errors.read_text())
print(json.dumps(outcomes))
