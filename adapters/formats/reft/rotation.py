"""Compute a trained ReFT rotation in numpy, as torch's orthogonal parametrisation does.

`torch.nn.utils.parametrizations.orthogonal` keeps a tall matrix X [n, k] and a square base Q0 [n, n] and computes Q =
Q0 H1 … Hk [:, :k] diag(X), where Hi = I - tau_i v_i v_i^T is the Householder reflection whose vector v_i has zeros
above row i, 1 in row i, and column i of X below it.
"""

from __future__ import annotations

import numpy as np

from adapters.errors import AdapterMalformed


def rotation_of(original: np.ndarray, base: np.ndarray | None, where: str) -> np.ndarray:
    """Q [n, k], with orthonormal columns, in float64, of a tall parameter [n, k] and its base [n, n]."""
    n, k = original.shape
    if k >= n:
        raise AdapterMalformed(f"{where}: a rotation of shape {[n, k]} has no low rank; the rank must be below {n}")
    if base is not None and base.shape != (n, n):
        raise AdapterMalformed(
            f"{where}: the base of a rotation of shape {[n, k]} must be {[n, n]}, not {list(base.shape)}"
        )
    below = np.tril(original.astype(np.float64), -1)
    taus = 2 / (1 + (below**2).sum(axis=0))
    rotation = np.eye(n, k)
    for column in reversed(range(k)):
        vector = below[:, column].copy()
        vector[column] = 1
        rotation -= taus[column] * np.outer(vector, vector @ rotation)
    rotation *= np.trunc(np.diagonal(original))  # torch casts the signs to int
    return rotation if base is None else base.astype(np.float64) @ rotation
