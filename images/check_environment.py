"""Ends a build whose environment lacks what Prelude asks for in pyproject.toml, or has another SGLang than the pin.

Arguments: the extras of pyproject.toml that the image is for.
"""

import sys
from importlib.metadata import PackageNotFoundError, requires, version

from packaging.requirements import Requirement

from engine.pin import SGLANG_VERSION


def problems(extras: list[str]) -> list[str]:
    """What is missing, or of another release, in words."""
    found = []
    for text in requires("prelude-serve") or ():
        requirement = Requirement(text)
        if requirement.marker and not any(requirement.marker.evaluate({"extra": each}) for each in ("", *extras)):
            continue
        try:
            installed = version(requirement.name)
        except PackageNotFoundError:
            found.append(f"{requirement}: not installed")
            continue
        if not requirement.specifier.contains(installed, prereleases=True):
            found.append(f"{requirement}: {installed} is installed")
    return found


if __name__ == "__main__":
    wrong = problems(sys.argv[1:])
    if {"cpu", "gpu"} & set(sys.argv[1:]) and version("sglang") != SGLANG_VERSION:
        wrong.append(f"sglang: the pin is {SGLANG_VERSION}, {version('sglang')} is installed")
    sys.exit("\n".join(wrong) or 0)
