"""GPUs according to their data sheets."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU. Peaks are the data sheet's, which nothing reaches: `Coefficients` says what share of them is counted on.

    A data sheet's GB are taken as 10^9 bytes. nvidia-smi shows up to 7 % more.
    """

    name: str
    memory_bytes: float
    memory_bytes_per_s: float
    flops: float  # of bfloat16 and float16 on tensor cores, dense
    link_bytes_per_s: float  # to the other GPUs of its host, both directions together: NVLink, else PCIe
    source: str


GPUS: Mapping[str, Gpu] = MappingProxyType(
    {
        gpu.name: gpu
        for gpu in (
            Gpu("a100-80g", 80e9, 2.039e12, 312e12, 600e9, "NVIDIA A100 data sheet, column A100 80GB SXM"),
            Gpu("l40s", 48e9, 0.864e12, 362.05e12, 64e9, "NVIDIA L40S data sheet; no NVLink: PCIe 4.0 x16"),
            Gpu("h100-sxm", 80e9, 3.35e12, 989.5e12, 900e9, "NVIDIA H100 data sheet, column SXM; half the sparse rate"),
            Gpu("h200", 141e9, 4.8e12, 989.5e12, 900e9, "NVIDIA H200 data sheet, column SXM; half the sparse rate"),
            Gpu("b200", 180e9, 8.0e12, 2250e12, 1.8e12, "NVIDIA HGX B200 data sheet, an eighth of the board's, dense"),
        )
    }
)
