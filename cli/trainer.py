"""`prelude trainer`: the training service of a cluster."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit

from yarl import URL

from cli.adapters.outcome import REFUSED, add_command, fail, print_result
from cli.libraries import needing
from cluster.errors import ConfigError

if TYPE_CHECKING:
    from cluster.config.schema import ClusterConfig

Asking = Callable[[str, str], tuple[int, Any]]

_TIMEOUT_S = 10.0
_REMEDY = "add `trainer: {url: http://127.0.0.1:8100}`, and give clients the router's URL"


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
    command.add_argument("--host", help="address to listen on; default: that of trainer.url")
    command.set_defaults(run=_run, writes_log=True)
    actions = command.add_subparsers(metavar="command")
    add_command(actions, "list", _list, "Show the models that are trained now.")
    stop = add_command(actions, "stop", _stop, "Forget models, and what waits for them. Their checkpoints stay.")
    show = add_command(actions, "show", _show, "Show models in full.")
    for each in (show, stop):
        each.add_argument("names", metavar="MODEL", nargs="+", help="its id, as `list` shows it")
    for each in actions.choices.values():
        each.set_defaults(writes_log=False)


def _list(arguments: argparse.Namespace) -> None:
    models = _ask(arguments, "GET", "/models")["models"]
    lines = (
        "{model}  {tenant}  {kind} rank {rank}  {state}  {steps} steps, {tokens} tokens  ".format_map(each)
        + (each["checkpoint"] or "no checkpoint")
        for each in models
    )
    print_result(arguments, {"models": models}, lines)


def _show(arguments: argparse.Namespace) -> None:
    models = {each["model"]: each for each in _ask(arguments, "GET", "/models")["models"]}
    for name in arguments.names:
        if name not in models:
            fail(arguments, REFUSED, "not_found", f"there is no model {name!r}; `prelude trainer list` shows them")
    lines = (f"{field}: {value}" for name in arguments.names for field, value in models[name].items())
    print_result(arguments, {"models": [models[name] for name in arguments.names]}, lines)


def _stop(arguments: argparse.Namespace) -> None:
    for name in arguments.names:
        _ask(arguments, "DELETE", f"/models/{quote(name, safe='')}")
    print_result(arguments, {"stopped": arguments.names}, (f"stopped {name}" for name in arguments.names))


def _ask(arguments: argparse.Namespace, method: str, path: str) -> Any:
    """The trainer's answer. Exits with 1 if there is none, or an error."""
    from cluster.config.load import load_cluster_config

    asking = asking_trainer(load_cluster_config(arguments.config), arguments.config)
    if asking is None:
        raise ConfigError(f"{arguments.config} has no section `trainer`; {_REMEDY}")
    try:
        status, answer = asking(method, path)
    except ConnectionError as error:
        fail(arguments, REFUSED, "unavailable", str(error))
    if status >= 400:
        fail(arguments, REFUSED, "refused", refusal_in(status, answer))
    return answer


def refusal_in(status: int, answer: Any) -> str:
    """Of a trainer's answer."""
    return answer["error"] if isinstance(answer, dict) else f"status {status}"


def asking_trainer(config: ClusterConfig, file: Path) -> Asking | None:
    """Asks the trainer as the operator, who has its key; None: there is none. Raises ConfigError.

    What it returns takes method and path, returns status and answer, and raises ConnectionError.
    """
    import asyncio

    import aiohttp

    from cluster.config.certificates import check_process
    from cluster.config.load import located
    from cluster.control.transport import Transport
    from cluster.trainer_key import trainer_key
    from process.certificates.identity import OPERATOR, TRAINER

    if config.trainer is None:
        return None
    assert config.trainer.key is not None
    with located(file):
        check_process(config, OPERATOR)
    tls = Transport.of(config, OPERATOR).engine_tls(TRAINER, TRAINER)
    place, headers = config.trainer.url, {"Authorization": f"Bearer {trainer_key(config.trainer.key)}"}

    async def ask(method: str, path: str) -> tuple[int, Any]:
        context, server = (True, None) if tls is None else tls()
        url, timeout = URL(f"{place}{path}", encoded=True), aiohttp.ClientTimeout(_TIMEOUT_S)
        async with (
            aiohttp.ClientSession(headers=headers, timeout=timeout) as session,
            session.request(method, url, ssl=context, server_hostname=server) as got,
        ):
            return got.status, None if got.status == 204 else await got.json(content_type=None)

    def asked(method: str, path: str) -> tuple[int, Any]:
        try:
            return asyncio.run(ask(method, path))
        except (OSError, TimeoutError, ValueError, aiohttp.ClientError) as error:
            raise ConnectionError(f"{place} does not answer ({error or type(error).__name__})") from error

    return asked


def _run(arguments: argparse.Namespace) -> None:
    from cluster.config.certificates import check_client_files, check_process, client_files, cluster_files
    from cluster.config.load import load_cluster_config, located
    from cluster.config.quotas import QuotasConfig
    from cluster.local.ports import bound_listener
    from cluster.trainer_key import trainer_key
    from process import log
    from process.addresses import host_and_port
    from process.certificates.contexts import Following, make_pinned_context, make_server_context, server_context
    from process.certificates.identity import TRAINER

    config = load_cluster_config(arguments.config)
    log.setup("trainer", config.log_level)
    if config.trainer is None:
        raise ConfigError(f"{arguments.config} has no section `trainer`; {_REMEDY}")
    with located(arguments.config):
        check_process(config, TRAINER)
        if not arguments.router:
            check_client_files(config)
    place, row_tokens, files = urlsplit(config.trainer.url), arguments.row_tokens, cluster_files(config, TRAINER)
    host, port = arguments.host or place.hostname or "", place.port or 0
    assert config.trainer.key is not None
    assert config.trainer.folder is not None
    if row_tokens < 128 or row_tokens % 128:
        raise ConfigError(f"--row-tokens is {row_tokens}; it must be a multiple of 128")
    scheme = "http" if config.router.tls is None else "https"
    if arguments.router and not re.fullmatch(r"https?://[^/\s]+/?", arguments.router):
        raise ConfigError(f"--router is {arguments.router}; give its URL, such as http://127.0.0.1:8000")
    router = arguments.router or f"{scheme}://{host_and_port(config.router.host, config.router.port)}"
    secret, of_clients = trainer_key(config.trainer.key), None if arguments.router else client_files(config)
    field = "--host" if arguments.host else "trainer.url"
    bound_listener(field, host, port + 1).close()  # of its status pages
    listener = bound_listener(field, host, port)
    with needing("train,trainer"):
        from training.executor.executor import ExecutorOptions
        from training.executor.turns import Share
        from training.runs.base import default_device
        from training.service.app import ServiceOptions
        from training.service.identity import CallsOfRouter, name_of
        from training.service.server import run

        def share_of(tenant: str) -> Share:
            quota = (config.router.quotas or QuotasConfig()).of_tenant(name_of(tenant))
            return Share(quota.weight, quota.training_tokens_per_min)

        options = ServiceOptions(
            base_name=config.model.name,
            folder=config.trainer.folder,
            router=router,
            secret=secret,
            status_at=(host, port + 1),
            executor=ExecutorOptions(row_tokens=row_tokens),
            max_rank=config.adapter_limits.max_rank,
            context_length=config.engine.context_length,
            share_of=share_of,
            model_name=config.trainer.model_name,
            # A router of this cluster.yaml has its certificate, whatever host that names.
            router_tls=(lambda: True) if of_clients is None else Following(of_clients, make_pinned_context).current,
        )
        run(
            options,
            CallsOfRouter(secret),
            config.model.path,
            config.model.dtype,
            arguments.device or default_device(),
            listener,
            None if files is None else server_context(Following(files, make_server_context)),
        )
