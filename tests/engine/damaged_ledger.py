# ruff: noqa: E402 the environment and the CPU support come first
"""Loads the plugin with an error in the ledger: ROLE FOLDER DAMAGE. Ends with 0 if the damage is not detected."""

from __future__ import annotations

import dataclasses
import os
import sys

role, folder, damage = sys.argv[1:]
os.environ["PRELUDE_ENGINE_ROLE"], os.environ["PRELUDE_ENGINE_DEVICE"] = role, "cpu"
os.environ["PRELUDE_ENGINE_REPORTS"] = folder

from engine import cpu_support

cpu_support.install()

import sglang.srt.managers.scheduler  # noqa: F401 with what most hooks are on
from sglang.srt.plugins import hook_registry, load_plugins

from engine.hooks import installation, ledger

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
