"""Makes `import sglang` work on a CPU-only machine.

`sgl_kernel` and `torchvision` have no build that imports with a CPU torch. SGLang imports names from both at module
level, but a text model on the torch-native path calls none of them, so stub modules replace them; calling a stub
raises. Patches that can wait until SGLang is imported are in the hook ledger.

Only engine processes may call this: a process that computes a reference must not see stubs.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import types

# Package -> version that its stub reports: transformers checks torchvision's before it registers image processors.
ABSENT_PACKAGES = {"sgl_kernel": "0.0.0", "torchvision": "0.28.0"}


def install() -> None:
    """Make `import sglang` possible in this process on a CPU-only machine. Idempotent."""
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    if any(isinstance(finder, _StubFinder) for finder in sys.meta_path):
        return
    absent = frozenset(name for name in ABSENT_PACKAGES if importlib.util.find_spec(name) is None)
    sys.meta_path.append(_StubFinder(absent))


class _Stub(types.ModuleType):
    """An absent package, or a name in it: attribute access works, calls raise."""

    def __getattr__(self, name: str) -> _Stub:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Stub(f"{self.__name__}.{name}")

    def __call__(self, *_args, **_kwargs):
        raise RuntimeError(f"{self.__name__} is not available in a CPU engine")


class _StubFinder(importlib.abc.Loader):
    """Provides stubs for the modules of absent packages, after all other finders."""

    def __init__(self, packages: frozenset[str]) -> None:
        self._packages = packages

    def find_spec(self, fullname: str, _path=None, _target=None):
        if fullname.split(".")[0] not in self._packages:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec) -> types.ModuleType:
        module = _Stub(spec.name)
        vars(module)["__version__"] = ABSENT_PACKAGES[spec.name.split(".")[0]]
        return module

    def exec_module(self, _module) -> None:
        return None
