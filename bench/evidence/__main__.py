"""`python -m bench.evidence`: rewrite the pages."""

from __future__ import annotations

import sys

from bench.evidence import PAGES, ROOT, rendered


def main() -> None:
    """Rewrite the pages and name those that changed."""
    for name in PAGES:
        before = (ROOT / name).read_text()
        after = rendered(before)
        if after != before:
            (ROOT / name).write_text(after)
            print(f"{name} updated", file=sys.stderr)


if __name__ == "__main__":
    main()
