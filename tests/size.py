"""Prints how large the project is: `python tests/size.py [DIR]`, of this checkout or of another."""

import subprocess
import sys
from pathlib import Path

_GENERATED = "_pb2"
_SMALL_LINES = 25


def sizes(root: Path) -> dict[str, int]:
    """Lines of Python, generated code aside, words of Markdown, and small modules, of the files that git knows."""
    listed = subprocess.run(["git", "ls-files"], cwd=root, capture_output=True, text=True, check=True).stdout
    paths = [Path(line) for line in listed.splitlines() if (root / line).is_file()]
    code = {path: (root / path).read_text().count("\n") for path in paths if path.suffix == ".py"}
    code = {path: lines for path, lines in code.items() if _GENERATED not in path.name}
    tests = {path: lines for path, lines in code.items() if path.parts[0] == "tests"}
    product = {path: lines for path, lines in code.items() if path not in tests}
    words = (len((root / path).read_text().split()) for path in paths if path.suffix == ".md")
    return {
        "product, lines": sum(product.values()),
        "product, modules": len(product),
        "product, modules under 25 lines": sum(lines < _SMALL_LINES for lines in product.values()),
        "tests, lines": sum(tests.values()),
        "documents, words": sum(words),
    }


if __name__ == "__main__":
    for name, size in sizes(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1]).items():
        print(f"{size:>8,} {name}")
