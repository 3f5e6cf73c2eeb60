"""The script `prelude`. Before it has looked, it imports nothing of ours that a stranger's package could replace."""

import sys

from process.collisions import collision


def main() -> None:
    """Run the command line. Exits with 1 beside a distribution whose packages have names of ours."""
    if said := collision():
        print(f"prelude: {said}", file=sys.stderr)
        sys.exit(1)
    from cli.main import main as run

    run()
