"""`prelude trainer`: the training service of a cluster."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from cli.train.outcome import failures_end
from cluster.errors import ConfigError


def add_commands(commands: Any) -> None:
    """Add `trainer` to the command line."""
    text = (
        "Serve the Tinker API: clients train adapters on the cluster's model. Needs the extras `train` and `trainer`."
    )
    command = commands.add_parser("trainer", help=text, description=text)
    command.add_argument("--config", type=Path, default=Path("cluster.yaml"), help="default: ./cluster.yaml")
    command.add_argument(
        "--folder",
        type=Path,
        help="of the log, checkpoints and snapshots; default: `trainer` in .prelude beside --config",
    )
    command.add_argument(
        "--host", default="127.0.0.1", help="beyond loopback only with router.auth; default: 127.0.0.1"
    )
    command.add_argument("--port", type=int, default=8100, help="default: 8100")
    command.add_argument("--router", metavar="URL", help="default: http and the address in cluster.yaml")
    command.add_argument("--device", help="default: a GPU if there is one, else cpu")
    command.add_argument(
        "--row-tokens", type=int, default=2048, help="of a sequence with its answers; a multiple of 128; default: 2048"
    )
    command.set_defaults(run=_run, writes_log=True)


def _run(arguments: argparse.Namespace) -> None:
    from cluster.config.fields import is_loopback
    from cluster.config.load import load_cluster_config
    from cluster.open_library import open_configured_catalog
    from process import log
    from process.addresses import host_and_port

    config = load_cluster_config(arguments.config)
    log.setup("trainer", config.log_level)
    auth, row_tokens = config.router.auth, arguments.row_tokens
    if auth is None and not is_loopback(arguments.host):
        raise ConfigError(f"--host {arguments.host}: without router.auth anybody could train; use loopback, or keys")
    if auth is not None and not auth.keys:
        raise ConfigError("router.auth.keys is false, and the Tinker SDK can send keys only")
    if row_tokens < 128 or row_tokens % 128:
        raise ConfigError(f"--row-tokens is {row_tokens}; it must be a multiple of 128")
    scheme = "http" if config.router.tls is None else "https"
    router = arguments.router or f"{scheme}://{host_and_port(config.router.host, config.router.port)}"
    with failures_end("train,trainer"):
        from training.executor.executor import ExecutorOptions
        from training.runs.base import default_device
        from training.service.app import ServiceOptions
        from training.service.identity import Anybody, KeysOfCatalog
        from training.service.server import run

        options = ServiceOptions(
            base_name=config.model.name,
            folder=arguments.folder or arguments.config.resolve().parent / ".prelude" / "trainer",
            router=router,
            executor=ExecutorOptions(row_tokens=row_tokens),
            max_rank=config.adapter_limits.max_rank,
            context_length=config.engine.context_length,
        )
        identities = Anybody() if auth is None else KeysOfCatalog(open_configured_catalog(config))
        device = arguments.device or default_device()
        run(options, identities, config.model.path, config.model.dtype, device, arguments.host, arguments.port)
