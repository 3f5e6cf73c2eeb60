"""The factors of one projection or layer while they are trained.

Masters have the dtype of the parameters, float32 as a rule. `served` rounds them as packing does
(adapters/model/serving.py), to what workers load in the model's dtype; gradients pass through the rounding unchanged.
So training computes with what will be served, and small steps still add up in the masters.
"""

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from adapters.formats.reft_kinds import fold
from adapters.model.normal_form import LoraFactors, ReftFactors, frozen_array


class ServedFactors(NamedTuple):
    """x + B^T (A x + b), the scale in B, in the dtype of the forward pass."""

    a: torch.Tensor  # [r, in]
    b: torch.Tensor  # [r, out]
    bias: torch.Tensor | None  # [r]

    def added(self, to: torch.Tensor, stream: torch.Tensor, base_only: torch.Tensor) -> torch.Tensor:
        """`to` [..., out] with B^T (A x + b) of each token's x in `stream` [..., in], but for those of `base_only`.

        `base_only` [num_tokens, 1] bool. The product of all tokens, with zeros, moves less memory than gathering them.
        """
        inner = stream.reshape(-1, stream.shape[-1]) @ self.a.T
        inner = inner if self.bias is None else inner + self.bias
        inner = inner.masked_fill(base_only, 0.0)
        return torch.addmm(to.reshape(-1, to.shape[-1]), inner, self.b).view(to.shape)


class TrainableLora(nn.Module):
    """W x + s B (A x). B starts at zero."""

    def __init__(self, size_in: int, size_out: int, rank: int, scale: float, dtype: torch.dtype):
        super().__init__()
        self.a = nn.Parameter(torch.empty(rank, size_in, dtype=dtype))
        self.b = nn.Parameter(torch.zeros(size_out, rank, dtype=dtype))
        self.scale = scale
        # Then a product of the masters' dtype is exact, too.
        self._is_exact = torch.tensor(scale, dtype=dtype).item() == scale
        nn.init.kaiming_uniform_(self.a, a=math.sqrt(5))  # as peft

    def served(self, dtype: torch.dtype) -> ServedFactors:
        scaled = self.b * self.scale if self._is_exact else (self.b.double() * self.scale).to(self.b.dtype)
        return ServedFactors(self.a.to(dtype), scaled.to(dtype).T, None)

    def factors(self) -> LoraFactors:
        return LoraFactors(_array(self.a), _array(self.b), self.scale, "float32")


class TrainableDireft(nn.Module):
    """h + s B^T (A h + b). B starts with orthonormal rows, A and b at zero."""

    def __init__(self, hidden: int, rank: int, scale: float, dtype: torch.dtype):
        super().__init__()
        self.a = nn.Parameter(torch.zeros(rank, hidden, dtype=dtype))
        self.b = nn.Parameter(_orthonormal_rows(rank, hidden, dtype))
        self.bias = nn.Parameter(torch.zeros(rank, dtype=dtype))
        self.hidden, self.scale = hidden, scale

    def served(self, dtype: torch.dtype) -> ServedFactors:
        return ServedFactors(self.a.to(dtype), _scaled(self.b, self.scale).to(dtype), self.bias.to(dtype))

    def tensors(self) -> dict[str, np.ndarray]:
        """As a file of Prelude's layout has them."""
        return {"A": _array(self.a), "B": _array(self.b), "bias": _array(self.bias)}

    def factors(self, where: str = "ReFT") -> ReftFactors:
        arrays = self.tensors()
        return fold("direft", arrays["A"], arrays["B"], arrays["bias"], self.scale, "float32", where)


class Rotation(nn.Module):
    """A matrix [hidden, r] whose columns stay orthonormal, whatever is done to its parameter.

    It is a product of r Householder reflections, whose vectors are the parameter. torch's own parametrisation is the
    same, but keeps the signs of the columns in the parameter, where weight decay makes zeros of them, or else a base
    of [hidden, hidden].
    """

    signs: torch.Tensor  # [r]

    def __init__(self, start: torch.Tensor):
        super().__init__()
        vectors, taus = torch.geqrf(start)
        signs = vectors.diagonal().sign()
        self.register_buffer("signs", torch.where(taus == 0, -signs, signs))  # LAPACK leaves such a column out
        self.vectors = nn.Parameter(vectors.tril(-1))

    def forward(self) -> torch.Tensor:
        below = self.vectors.tril(-1)
        return torch.linalg.householder_product(below, 2 / (1 + (below * below).sum(dim=0))) * self.signs


class TrainableLoreft(nn.Module):
    """h + s R^T (W h + b - R h). R keeps orthonormal rows; W starts as R, b at zero."""

    def __init__(self, hidden: int, rank: int, scale: float, dtype: torch.dtype):
        super().__init__()
        self.rotation = Rotation(_orthonormal_rows(rank, hidden, dtype).T.contiguous())
        # Of the rotation as it is computed, not as it was drawn: W - R must be exactly zero.
        self.w = nn.Parameter(self.rotation().detach().T.contiguous())
        self.bias = nn.Parameter(torch.zeros(rank, dtype=dtype))
        self.hidden, self.scale = hidden, scale

    def served(self, dtype: torch.dtype) -> ServedFactors:
        rotation = self.rotation().T
        difference = (self.w.double() - rotation.double()).to(self.w.dtype)
        return ServedFactors(difference.to(dtype), _scaled(rotation, self.scale).to(dtype), self.bias.to(dtype))

    def tensors(self) -> dict[str, np.ndarray]:
        return {"W": _array(self.w), "R": _array(self.rotation().T), "bias": _array(self.bias)}

    def factors(self, where: str = "ReFT") -> ReftFactors:
        arrays = self.tensors()
        return fold("loreft", arrays["W"], arrays["R"], arrays["bias"], self.scale, "float32", where)


TrainableReft = TrainableDireft | TrainableLoreft


def _scaled(values: torch.Tensor, scale: float) -> torch.Tensor:
    """In the masters' dtype, the scale rounded to it first."""
    return values * values.new_tensor(scale)


def _orthonormal_rows(rank: int, hidden: int, dtype: torch.dtype) -> torch.Tensor:
    return nn.init.orthogonal_(torch.empty(rank, hidden, dtype=dtype))


def _array(tensor: torch.Tensor) -> np.ndarray:
    return frozen_array(tensor.detach().float().cpu().numpy().copy())
