"""The secret with which a router proves itself to the trainer: what it says of callers is believed."""

import os
import secrets
from contextlib import suppress
from pathlib import Path

from adapters.files.durable import fsync, make_folder
from cluster.errors import ConfigError

_LEAST = 32  # characters


def trainer_key(path: Path) -> str:
    """The file's secret. Where there is none, makes one that only this user can read. Raises ConfigError."""
    try:
        if not path.exists():
            make_folder(path.parent)
            temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
            with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(secrets.token_urlsafe(_LEAST))
            fsync(temporary)  # an empty file would end every later start
            with suppress(FileExistsError):  # the other process has been faster
                os.link(temporary, path)
            temporary.unlink()
        key = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is no text in ASCII"
        raise ConfigError(f"trainer.key: {path} cannot be used ({why}); name a file that may be written") from error
    if len(key) < _LEAST or not key.isprintable():
        raise ConfigError(f"trainer.key: {path} has no line of {_LEAST} characters or more; remove it, or fill it")
    return key
