"""How an agent whose engine cannot start tells why, before it ends."""

import logging
from pathlib import Path

log = logging.getLogger(__name__)


def note_given_up(scratch: Path, reason: str) -> None:
    """Leave the reason in the agent's folder, for `prelude up`, and as the last line of its log."""
    try:
        _path(scratch).write_text(reason)
    except OSError as error:
        log.warning("reason not written", extra={"fields": {"reason": str(error)}})
    log.error("giving up: the engine fails at each start", extra={"fields": {"reason": reason}})


def given_up(scratch: Path) -> str:
    """Why the agent that used this folder has given up; empty if it has not."""
    try:
        return _path(scratch).read_text()
    except FileNotFoundError:
        return ""


def _path(scratch: Path) -> Path:
    return scratch / "given-up"
