"""Provenance of results: commit, machine, versions."""

import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

COMMIT_VARIABLE = "PRELUDE_COMMIT"  # the commit, for copies without a git checkout
_ROOT = Path(__file__).parents[2]
_PACKAGES = ("sglang", "torch", "transformers", "nixl", "aiohttp", "numpy")
# What a CPU has for products in bfloat16, the fastest first; with AVX2 alone they are slow.
_VECTORS = ("amx_bf16", "avx512_bf16", "avx512f", "avx2")


def head(benchmark: str, command: str, settings: Mapping[str, Any], device: str = "cpu") -> dict[str, Any]:
    """What every result file begins with: what was run, where, and with which settings."""
    return {
        "benchmark": benchmark,
        "commit": commit(),
        "command": command,
        "hardware": hardware(device),
        "versions": versions(),
        "settings": settings,
    }


def commit() -> str:
    """The commit checked out, with `+changes` when files differ from it; outside of a checkout, $PRELUDE_COMMIT.

    Results are no changes: a benchmark may follow one that has just written its own.
    An installed copy may be inside of someone else's checkout, in its virtual environment.
    """
    try:
        top, head, changes = (
            subprocess.run(
                ["git", "-C", str(_ROOT), *words], check=True, capture_output=True, text=True, timeout=30
            ).stdout.strip()
            for words in (
                ["rev-parse", "--show-toplevel"],
                ["rev-parse", "HEAD"],
                ["status", "--porcelain", "--untracked-files=no", "--", ".", ":!bench/results"],
            )
        )
    except (OSError, subprocess.SubprocessError):
        top = ""
    if not top or Path(top).resolve() != _ROOT.resolve():
        return os.environ.get(COMMIT_VARIABLE, "unknown")
    return head + ("+changes" if changes else "")


def hardware(device: str) -> dict[str, object]:
    """Properties of the machine that affect speed."""
    flags = _of_cpu("flags").split()
    return {
        "cpu": _of_cpu("model name") or platform.processor() or "unknown",
        "vectors": next((each for each in _VECTORS if each in flags), "unknown"),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpu": "none used" if device == "cpu" else gpu_name(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "load_average_at_start": round(os.getloadavg()[0], 2),
    }


def gpu_name() -> str:
    """The first GPU's name from its driver; "unknown GPU" without a driver."""
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        lines = subprocess.run(command, check=True, capture_output=True, text=True, timeout=30).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return "unknown GPU"
    return lines[0].strip() if lines else "unknown GPU"


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that affect speed."""
    found = {"python": sys.version.split()[0]}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def _of_cpu(name: str) -> str:
    """A property of the first core; empty if the kernel has none of this name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((value.strip() for key, _, value in (line.partition(":") for line in lines) if key.strip() == name), "")
