"""Fold the tensors of one layer's ReFT module, as pyreft names them, into normal form."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from adapters.errors import AdapterIncompatible, AdapterMalformed
from adapters.formats.checks import check_rank, common_dtype
from adapters.formats.folder import AdapterFolder
from adapters.formats.reft_kinds import ReftKind, fold
from adapters.formats.safetensors_file import SafetensorsFile
from adapters.model.normal_form import ReftFactors

_ORIGINAL = "rotate_layer.parametrizations.weight.original"
_BASE = "rotate_layer.parametrizations.weight.0.base"
_SIZES = ("embed_dim", "interchange_dim")  # integers that pyvene keeps among the tensors


class ReftState:
    """The tensors of one module. `read` takes them by name, and none may be left at its end."""

    def __init__(self, file: SafetensorsFile, tensors: Mapping[str, str], hidden: int, where: str):
        self._file = file
        self._left = dict(tensors)  # name inside the module -> name in the file
        self._hidden = hidden
        self._where = where
        self._dtypes: list[str] = []

    def read(self, kind: ReftKind, folder: AdapterFolder) -> ReftFactors:
        """The module in normal form. pyreft has no scale, so it is 1."""
        self._check_sizes()
        rotation = self._rotation()
        rank = rotation.shape[0]
        if rank < 1 or rank >= self._hidden:
            raise AdapterMalformed(f"{self._where} has rank {rank}; it must be from 1 to {self._hidden - 1}")
        check_rank(rank, self._where, folder)
        source, bias = self._source(rank)
        if self._left:
            raise AdapterMalformed(
                f"{self._where} has the tensor {min(self._left)[:100]!r}, which a {kind} has not; "
                "an adapter is never served in part"
            )
        return fold(kind, source, rotation, bias, 1.0, common_dtype(*self._dtypes), self._where)

    def _check_sizes(self) -> None:
        for name in _SIZES:
            if name in self._left and (size := self._file.read_integer(self._left.pop(name))) != self._hidden:
                raise AdapterIncompatible(
                    f"{self._where}: {name} is {size}, but the base model's hidden size is {self._hidden}; "
                    "the adapter was made for another model"
                )

    def _rotation(self) -> np.ndarray:
        """R [r, hidden]"""
        if _ORIGINAL in self._left:
            original = self._matrix(_ORIGINAL, is_tall=True)
            base = self._take(_BASE) if _BASE in self._left else None
            return rotation_of(original.T, base, self._where).T
        return self._matrix("rotate_layer", is_tall=True)

    def _source(self, rank: int) -> tuple[np.ndarray, np.ndarray]:
        """W [r, hidden] and b [r]."""
        prefix = "" if "weight" in self._left else "learned_source."
        source = self._matrix(f"{prefix}weight")
        if source.shape[0] != rank:
            raise AdapterMalformed(f"{self._where}: the learned source has rank {source.shape[0]}, the rotation {rank}")
        return source, self._vector(f"{prefix}bias", rank)

    def _matrix(self, name: str, is_tall: bool = False) -> np.ndarray:
        """A tensor [r, hidden], or [hidden, r] in the file if it `is_tall`."""
        array = self._take(name)
        wide = array.T if is_tall else array
        if array.ndim == 2 and wide.shape[1] == self._hidden and 0 < wide.shape[0] < self._hidden:
            return wide
        if array.ndim == 2 and self._hidden not in array.shape:
            raise AdapterIncompatible(
                f"{self._where}: {name} has the shape {list(array.shape)}, but the base model's hidden size is "
                f"{self._hidden}; the adapter was made for another model"
            )
        raise AdapterMalformed(
            f"{self._where}: {name} has the shape {list(array.shape)}; it must be of a rank from 1 to "
            f"{self._hidden - 1} and the size {self._hidden}"
        )

    def _vector(self, name: str, size: int) -> np.ndarray:
        array = self._take(name)
        if array.shape != (size,):
            raise AdapterMalformed(f"{self._where}: {name} has the shape {list(array.shape)}; it must be [{size}]")
        return array

    def _take(self, name: str) -> np.ndarray:
        if name not in self._left:
            raise AdapterMalformed(f"{self._where} has no tensor {name!r}; the file is incomplete or of another kind")
        tensor = self._left.pop(name)
        self._dtypes.append(self._file.dtype_of(tensor))
        return self._file.read(tensor)


def rotation_of(original: np.ndarray, base: np.ndarray | None, where: str) -> np.ndarray:
    """Q [n, k], with orthonormal columns, in float64, of a tall parameter X [n, k] and its base Q0 [n, n].

    As `torch.nn.utils.parametrizations.orthogonal`: Q = Q0 H1 … Hk [:, :k] diag(X), where Hi = I - tau_i v_i v_i^T is
    the Householder reflection whose vector v_i has zeros above row i, 1 in row i, and column i of X below it.
    """
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
