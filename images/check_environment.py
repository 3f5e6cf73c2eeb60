"""Ends a build whose environment lacks what Prelude asks for in pyproject.toml, such as the pinned SGLang, or cannot
import what its processes do.

Arguments: the extras of pyproject.toml that the image is for.
"""

import sys
from importlib import import_module
from importlib.metadata import PackageNotFoundError, requires, version

from packaging.requirements import Requirement

ROUTER = (
    *("router.server", "router.identity.oidc", "router.identity.issuer", "cluster.discovery.dns"),
    *("cli.main", "cli.adapters.catalog", "cli.adapters.store", "cluster.open_library", "process.tracing"),
    *("psycopg", "s3fs"),
)
ENGINE = (
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.managers.scheduler",
    "nixl._api",
    "prefill_worker.unified_agent",
)


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
    if wrong := problems(sys.argv[1:]):
        sys.exit("\n".join(wrong))
    for name in ROUTER:
        import_module(name)
    if "cpu" in sys.argv[1:]:
        import_module("engine.cpu_support").install()
        for name in ENGINE:
            import_module(name)
