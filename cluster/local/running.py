"""Records the configuration that `prelude up` runs, with the ports that it chose, for commands that call agents."""

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path

from cluster.config.load import dump_cluster_config, load_cluster_config
from cluster.config.schema import ClusterConfig
from cluster.errors import ConfigError, StartError


def record_of(config_path: Path) -> Path:
    """The path at which `prelude up` records the configuration that it runs from this file."""
    return config_path.resolve().parent / ".prelude" / f"running-{config_path.name}"


@contextlib.contextmanager
def only_one(config_path: Path) -> Iterator[None]:
    """Raise StartError if another `prelude up` is in this block: they would share logs, caches and the record."""
    with config_path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StartError(
                f"{config_path}: another `prelude up` runs it; stop that, or copy it to another folder"
            ) from None
        except OSError:  # a file system without locks
            pass
        yield


@contextlib.contextmanager
def recorded(config: ClusterConfig, record: Path | None) -> Iterator[None]:
    """Record the configuration in the file inside the block. If it cannot be written, commands need fixed ports."""
    written = b""
    if record is not None:
        with contextlib.suppress(OSError):
            record.parent.mkdir(exist_ok=True)
            dump_cluster_config(config, record)
            written = record.read_bytes()
    try:
        yield
    finally:
        if record is not None:
            with contextlib.suppress(OSError):
                if record.read_bytes() == written:  # not that of a cluster that was started later
                    record.unlink()


def with_running_ports(config: ClusterConfig, config_path: Path) -> ClusterConfig:
    """The configuration with the ports of the cluster that runs it; unchanged if none is recorded."""
    record = record_of(config_path)
    router = config.router
    is_fixed = bool(router.port) and router.admin.port and all(each.control_port for each in config.workers.values())
    if is_fixed or not record.exists():
        return config
    try:
        running = load_cluster_config(record)
    except ConfigError:  # half written, or of another version
        return config
    return running if running.workers.keys() == config.workers.keys() else config
