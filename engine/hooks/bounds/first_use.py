"""Body of the hook that keeps a sampler from being compiled while requests wait."""

from __future__ import annotations

import inspect
from typing import Any


def run_uncompiled(compiled: Any, *tensors: Any) -> Any:
    """Run the function that `torch.compile` wraps.

    Compiled, it takes 10 to 50 s at its first use, and seconds again when the shape of the batch changes. Without, it
    makes three elementwise passes over the logits instead of one.
    """
    return inspect.unwrap(compiled)(*tensors)
