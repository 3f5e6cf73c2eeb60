"""The pages, their fenced blocks, and the commands in them."""

import json
import re
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[3]
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in ("*.md", "docs/**/*.md", "bench/results/*.md")
    for path in ROOT.glob(pattern)
)
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)


def text_of(page: str) -> str:
    return (ROOT / page).read_text()


def blocks_of(text: str) -> list[tuple[str, str]]:
    """Language and content of each fenced block, also of those in lists."""
    return [(match[2], textwrap.dedent(match[3])) for match in FENCE.finditer(text)]


def commands_of(page: str) -> list[str]:
    """Each command of the shell blocks, with its comment; a line that ends with \\ goes on, and so does a heredoc."""
    found = []
    for language, block in blocks_of(text_of(page)):
        if language == "sh":
            lines = [block] if "<<" in block else block.replace("\\\n", " ").splitlines()
            found += [line.strip() for line in lines if line.strip()]
    return found


def _after(page: str, command: str) -> str:
    return text_of(page).replace("\\\n", " ").partition(command)[2].lstrip("\n").removeprefix("```").lstrip()


def promised_answer(page: str, command: str) -> str | None:
    """The text that the page says next that a request is answered with; None if it says nothing of the kind."""
    found = re.match(r"(?:The answer is|answers) `([^`]*)`", _after(page, command))
    return found and found[1]


def promised_fields(page: str, command: str) -> set[str] | None:
    """Those of the JSON that the page shows next."""
    found = re.match(r"```json\n(.*?)```", _after(page, command), re.DOTALL)
    return set(json.loads(found[1])) if found else None
