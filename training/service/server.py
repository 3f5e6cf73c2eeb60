"""The trainer as a process: loads the base model, goes on where the last process ended, serves until SIGTERM."""

from __future__ import annotations

import fcntl
import os
from dataclasses import dataclass
from pathlib import Path

import uvicorn

from adapters.files.durable import make_folder
from training.errors import OptionInvalid
from training.runs.base import Dtype, load_base
from training.service.app import Service, ServiceOptions
from training.service.identity import Identities

_MAX_CONNECTIONS = 8192
_GRACE_S = 5  # of requests at the end; long polls come again


@dataclass(frozen=True, slots=True)
class TrainerOptions:
    model: Path
    dtype: Dtype
    device: str
    host: str
    port: int
    service: ServiceOptions


def run(options: TrainerOptions, identities: Identities) -> None:
    """Raises TrainingError before it serves."""
    folder = options.service.folder
    try:
        make_folder(folder)
        lock = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise OptionInvalid(f"another trainer uses {folder}; stop it, or name another folder") from None
    except OSError as error:
        raise OptionInvalid(f"{folder} cannot be written to ({error.strerror}); name another folder") from error
    base = load_base(options.model, options.dtype, options.device)
    config = uvicorn.Config(
        Service(base, identities, options.service).app(),
        host=options.host,
        port=options.port,
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
    uvicorn.Server(config).run()
    os.close(lock)
