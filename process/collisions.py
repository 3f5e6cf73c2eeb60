"""Whether another distribution has installed a package under the name of one of ours."""

import importlib.util
from importlib.metadata import distributions
from pathlib import Path

DISTRIBUTION = "prelude-serve"
PACKAGES = (
    "adapters", "bench", "cli", "cluster", "decode_worker", "engine", "observability", "prefill_worker", "process",
    "router", "samples", "training",
)  # fmt: skip


def collision() -> str | None:
    """What collides, with the remedy; None if nothing does.

    Files of two distributions under one name overwrite each other, and of two folders the first on the path hides the
    other: then commands fail late, with an error about a missing module, or run a stranger's code.
    """
    for each in distributions():
        if each.metadata["Name"] != DISTRIBUTION:
            for package in (each.read_text("top_level.txt") or "").split():
                if package in PACKAGES:
                    return f"{each.metadata['Name']} has a package {package!r}, as Prelude has: {_REMEDY}"
    root = Path(__file__).parents[1]
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None or Path(spec.origin).parents[1] != root:
            found = None if spec is None else spec.origin
            return f"the package {package!r} is {found}, and not {root / package}: {_REMEDY}"
    return None


_REMEDY = "install Prelude in a virtual environment of its own"
