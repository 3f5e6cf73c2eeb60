"""`prelude trainer`: the training service of a cluster."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from cli.train.outcome import failures_end
from cluster.errors import ConfigError


def add_commands(commands: Any) -> None:
    """Add `trainer` to the command line."""
    text = (
        "Serve the Tinker API: clients train adapters on the cluster's model. Needs the extras `train` and `trainer`."
    )
    command = commands.add_parser("trainer", help=text, description=text)
    command.add_argument("--config", type=Path, default=Path("cluster.yaml"), help="default: ./cluster.yaml")
    command.add_argument("--router", metavar="URL", help="default: http and the address in cluster.yaml")
    command.add_argument("--device", help="default: a GPU if there is one, else cpu")
    command.add_argument(
        "--row-tokens", type=int, default=2048, help="of a sequence with its answers; a multiple of 128; default: 2048"
    )
    command.set_defaults(run=_run, writes_log=True)


def _run(arguments: argparse.Namespace) -> None:
    from cluster.config.certificates import check_process, cluster_files
    from cluster.config.load import load_cluster_config, located
    from cluster.config.quotas import QuotasConfig
    from cluster.trainer_key import trainer_key
    from process import log
    from process.addresses import host_and_port
    from process.certificates.contexts import Following, make_server_context, server_context
    from process.certificates.identity import TRAINER

    config = load_cluster_config(arguments.config)
    log.setup("trainer", config.log_level)
    if config.trainer is None:
        remedy = "add `trainer: {url: http://127.0.0.1:8100}`, and give clients the router's URL"
        raise ConfigError(f"{arguments.config} has no section `trainer`; {remedy}")
    with located(arguments.config):
        check_process(config, TRAINER)
    place, row_tokens, files = urlsplit(config.trainer.url), arguments.row_tokens, cluster_files(config, TRAINER)
    assert config.trainer.key is not None
    assert config.trainer.folder is not None
    if row_tokens < 128 or row_tokens % 128:
        raise ConfigError(f"--row-tokens is {row_tokens}; it must be a multiple of 128")
    scheme = "http" if config.router.tls is None else "https"
    router = arguments.router or f"{scheme}://{host_and_port(config.router.host, config.router.port)}"
    secret = trainer_key(config.trainer.key)
    with failures_end("train,trainer"):
        from training.executor.executor import ExecutorOptions
        from training.executor.turns import Share
        from training.runs.base import default_device
        from training.service.app import ServiceOptions
        from training.service.identity import CallsOfRouter
        from training.service.server import run

        def share_of(tenant: str) -> Share:
            quota = (config.router.quotas or QuotasConfig()).of_tenant(tenant)
            return Share(quota.weight, quota.training_tokens_per_min)

        options = ServiceOptions(
            base_name=config.model.name,
            folder=config.trainer.folder,
            router=router,
            secret=secret,
            executor=ExecutorOptions(row_tokens=row_tokens),
            max_rank=config.adapter_limits.max_rank,
            context_length=config.engine.context_length,
            share_of=share_of,
        )
        run(
            options,
            CallsOfRouter(secret),
            config.model.path,
            config.model.dtype,
            arguments.device or default_device(),
            place.hostname or "",
            place.port or 0,
            None if files is None else server_context(Following(files, make_server_context)),
        )
