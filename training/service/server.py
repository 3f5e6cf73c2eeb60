"""The trainer as a process: loads the base model, goes on where the last process ended, serves until SIGTERM."""

import fcntl
import os
import socket
import sqlite3
import ssl
from pathlib import Path

import uvicorn

from adapters.files.durable import make_folder, whole_file
from adapters.files.work_folder import sweep_abandoned
from adapters.model.base_weights import are_known_to_differ, weights_digest
from process.uvicorn_server import StoppedByOneSignal
from training.errors import OptionInvalid
from training.runs.base import Dtype, load_base
from training.service.app import Service, ServiceOptions
from training.service.identity import Identities

_MAX_CONNECTIONS = 8192
_GRACE_S = 5  # of requests at the end; long polls come again


def run(
    options: ServiceOptions,
    identities: Identities,
    model: Path,
    dtype: Dtype,
    device: str,
    listener: socket.socket,
    tls: ssl.SSLContext | None = None,
) -> None:
    """`model`: the directory of the base model. `listener`: a bound socket. `tls`: None for plain text.

    Raises TrainingError before it serves.
    """
    folder = options.folder
    try:
        make_folder(folder)
        sweep_abandoned()
        lock = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        base = load_base(model, dtype, device)
        _check_base(folder / "base", weights_digest(model), model)
        app = Service(base, identities, options).app()
    except BlockingIOError:
        raise OptionInvalid(f"another trainer uses {folder}; stop it, or name another folder") from None
    except OSError as error:
        raise OptionInvalid(f"{folder} cannot be written to ({error.strerror}); name another folder") from error
    except sqlite3.DatabaseError as error:
        remedy = "make room if the disk is full, else restore the folder or name another one"
        raise OptionInvalid(f"the log in {folder} cannot be read or written ({error}); {remedy}") from error
    config = uvicorn.Config(
        app,
        loop="uvloop",
        http="httptools",
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        limit_concurrency=_MAX_CONNECTIONS,
        timeout_graceful_shutdown=_GRACE_S,
    )
    config.load()
    config.ssl = tls
    StoppedByOneSignal(config).run(sockets=[listener])
    os.close(lock)


def _check_base(known: Path, digest: str, model: Path) -> None:
    """Adapters mean nothing on other weights. Raises OptionInvalid."""
    if known.exists():
        if are_known_to_differ(known.read_text(), digest):
            raise OptionInvalid(
                f"{known.parent} has adapters of another base model than {model}; take that one, or another folder"
            )
    else:
        with whole_file(known) as temporary:
            temporary.write_text(digest)
