"""Applies the ledger's hooks to this process and verifies them.

SGLang's plugin loader fails open: it only logs a hook that it cannot apply. So every step is checked here, and the
caller exits on HookMismatch.
"""

import functools
import hashlib
import importlib
import importlib.metadata
import inspect
import pkgutil
from typing import Any

from engine.errors import HookMismatch
from engine.hooks.hook import LORA_ROLES, Hook, HookKind, can_be
from engine.hooks.ledger import hooks_for
from engine.pin import SGLANG_VERSION

BUILTIN = "builtin"  # the source digest of a target written in C


def install(role: str, device: str) -> list[str]:
    """Apply and verify every hook of this role and device; returns their names.

    Raises HookMismatch when the SGLang release, a target or its source is not what the ledger was written for.
    """
    version = importlib.metadata.version("sglang")
    if version != SGLANG_VERSION:
        raise HookMismatch(f"SGLang {version} is installed; the hooks are verified for {SGLANG_VERSION} only")
    hooks = hooks_for(role, device)
    for hook in hooks:
        found = source_sha256(hook)
        if found != hook.source_sha256:
            raise HookMismatch(
                f"hook {hook.name}: the source of {hook.target} has digest {found}, "
                f"the ledger was written for {hook.source_sha256}"
            )
    for hook in hooks:
        _apply(hook)
    _registry().apply_hooks()
    for hook in hooks:
        if not is_installed(hook):
            raise HookMismatch(f"hook {hook.name}: {hook.target} did not take it")
    if device == "cpu" and can_be(role, LORA_ROLES):
        _register_cpu_backend(role)
    return [hook.name for hook in hooks]


def _register_cpu_backend(role: str) -> None:
    """Give SGLang our backend for LoRA on CPUs, by its own registry."""
    from sglang.srt.lora.backend.lora_registry import register_lora_backend

    def backend() -> type:
        from engine.adapter_slots import cpu_backend

        return cpu_backend.UnpinnedBackend if role == "stock" else cpu_backend.SegmentsBackend

    register_lora_backend("torch_native")(backend)


def source_sha256(hook: Hook) -> str:
    """Digest of the target's source as it is installed here."""
    owner, name = _resolve(hook)
    if hook.kind is HookKind.GLOBAL:
        source = inspect.getsource(owner)
    else:
        original = inspect.unwrap(_function_at(owner, name))
        if not inspect.isfunction(original):
            return BUILTIN
        source = inspect.getsource(original)
    return hashlib.sha256(source.encode()).hexdigest()


def is_installed(hook: Hook) -> bool:
    """Whether the target now carries this hook's mark."""
    owner, name = _resolve(hook)
    if hook.kind is HookKind.GLOBAL:
        return _installed_globals.get(hook.name) is getattr(owner, name)
    target = _function_at(owner, name)
    while target is not None:
        for cell in getattr(target, "__closure__", None) or ():
            if getattr(cell.cell_contents, "prelude_hook", None) == hook.name:
                return True
        target = getattr(target, "__wrapped__", None)
    return False


_installed_globals: dict[str, Any] = {}


def _apply(hook: Hook) -> None:
    owner, name = _resolve(hook)
    if hook.kind is HookKind.GLOBAL:
        if hook.name not in _installed_globals:
            _installed_globals[hook.name] = hook.fn(getattr(owner, name))
            setattr(owner, name, _installed_globals[hook.name])
        return
    from sglang.srt.plugins.hook_registry import HookType

    _registry().register(hook.target, _marked(hook), HookType(hook.kind.value))


def _marked(hook: Hook):
    @functools.wraps(hook.fn)
    def marked(*args, **kwargs):
        return hook.fn(*args, **kwargs)

    marked.prelude_hook = hook.name  # type: ignore[attr-defined]
    return marked


def _registry():
    from sglang.srt.plugins.hook_registry import HookRegistry

    return HookRegistry


def _resolve(hook: Hook) -> tuple[Any, str]:
    path, name = hook.target.rsplit(".", 1)
    try:
        owner = importlib.import_module(path) if hook.kind is HookKind.GLOBAL else pkgutil.resolve_name(path)
    except (ImportError, AttributeError) as error:
        raise HookMismatch(f"hook {hook.name}: {path} cannot be found: {error}") from error
    if not hasattr(owner, name):
        raise HookMismatch(f"hook {hook.name}: {path} has no {name}")
    # A hook would wrap an inherited method on the subclass only, and turn a static method into a plain one.
    if isinstance(owner, type) and name not in vars(owner) and hook.source_sha256 != BUILTIN:
        raise HookMismatch(f"hook {hook.name}: {name} is not defined on {path} itself")
    return owner, name


def _function_at(owner: Any, name: str) -> Any:
    raw = vars(owner).get(name) if isinstance(owner, type) else getattr(owner, name)
    if isinstance(raw, (staticmethod, classmethod)):
        return raw.__func__
    return getattr(owner, name) if raw is None else raw
