"""The command line: `prelude <command>`."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adapters.errors import AdapterError, BaseModelInvalid
from bench.errors import BenchError
from bench.errors import OptionInvalid as BenchOptionInvalid
from cli.libraries import quiet_libraries, quieten_imports
from cluster.errors import ClusterError, ConfigError
from process.collisions import DISTRIBUTION
from process.lifetime import ctrl_c_ends_process, die_with_parent
from training.errors import OptionInvalid, TrainingError

if TYPE_CHECKING:
    from cluster.agent.worker_agent import WorkerAgent
    from cluster.config.schema import ClusterConfig

_SCRATCH_PREFIX = "prelude-scratch-"


def main(argv: list[str] | None = None) -> None:
    """Entry point of `prelude`. Exits with 2 on bad arguments or configuration, 1 on failure."""
    try:
        try:
            _run(argv)
        finally:
            print(end="", flush=True)
    except BrokenPipeError:  # whoever read the output has left; Python would complain about the rest at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + signal.SIGPIPE)


def _run(argv: list[str] | None) -> None:
    with ctrl_c_ends_process():
        quieten_imports()
        arguments = _parser().parse_args(argv)
    if os.environ.get("PRELUDE_DIE_WITH_PARENT"):
        die_with_parent()
    try:
        with contextlib.nullcontext() if arguments.writes_log else quiet_libraries():
            arguments.run(arguments)
    except (AdapterError, ClusterError, BenchError, TrainingError) as error:
        print(f"prelude: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, BaseModelInvalid | ConfigError | BenchOptionInvalid | OptionInvalid) else 1)
    except BrokenPipeError:
        raise
    except OSError as error:
        if arguments.writes_log:
            raise
        print(f"prelude: {str(error) or type(error).__name__}", file=sys.stderr)  # such as a full disk
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


class _Parser(argparse.ArgumentParser):
    """Takes options by their whole names: a new option changes no old command, and no secret hides behind `--head`."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="prelude", description="Serve one large language model with adapters that are applied to the prompt only."
    )
    parser.set_defaults(writes_log=False)  # True: its output is a log, which keeps warnings
    parser.set_defaults(run=lambda _: parser.print_help())
    parser.add_argument("--version", action="version", version=f"prelude {version(DISTRIBUTION)}")
    commands = parser.add_subparsers(metavar="command")

    def add(name: str, run, text: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text)
        command.set_defaults(run=run)
        return command

    def add_config(command: argparse.ArgumentParser) -> None:
        command.add_argument("--config", type=Path, default=Path("cluster.yaml"), help="default: ./cluster.yaml")

    up = add("up", _up, "Start all processes of a cluster on this machine; Ctrl-C stops them.")
    add_config(up)
    up.add_argument("--logs", type=Path, help="folder for log files; default: `logs` beside the configuration")

    router = add("router", _router, "Run the router of a cluster.")
    router.set_defaults(writes_log=True)
    add_config(router)

    for role in ("prefill", "decode", "unified"):
        worker = add(f"{role}-worker", _worker, f"Run one {role} worker: its agent and its engine.")
        worker.set_defaults(role=role, writes_log=True)
        add_config(worker)
        worker.add_argument(
            "--name",
            required=True,
            help="the worker's name in `workers`, or a new one for `discovery` to find",
        )
        worker.add_argument(
            "--host", help="for a worker not listed in `workers`: the address at which others reach this host"
        )
        worker.add_argument("--scratch", type=Path, help="folder for temporary files; default: a temporary one")

    from cli import audit, certs, doctor, grants, init, keys, plan, tenants, trainer, usage, workers
    from cli import catalog as catalog_commands
    from cli.adapters import catalog, convert, store, verify
    from cli.adapters.outcome import add_group
    from cli.bench import goodput, load, matrix, simulate
    from cli.train import commands as train

    text = "Verify and convert adapter directories, manage revisions and aliases."
    adapters_commands = add_group(commands, "adapters", text)
    for module in (verify, convert, catalog, store):
        module.add_commands(adapters_commands)
    init.add_commands(commands)
    plan.add_command(commands)
    doctor.add_command(commands)
    workers.add_commands(commands)
    keys.add_commands(commands)
    grants.add_commands(commands)
    certs.add_commands(commands)
    tenants.add_commands(commands)
    audit.add_commands(commands)
    catalog_commands.add_commands(commands)
    usage.add_commands(commands)
    benchmarks = add_group(commands, "bench", "Run a benchmark on this machine.")
    for benchmark in (load, matrix, goodput, simulate):
        benchmark.add_command(benchmarks)
    train.add_commands(commands)
    trainer.add_commands(commands)

    demo = add("demo", _demo, "Write a small chat model, adapters for it and a cluster.yaml, to try Prelude with.")
    demo.add_argument("folder", type=Path, help="created; if it already has a cluster.yaml, nothing is changed")
    demo.add_argument("--toy", action="store_true", help="random weights: ready in seconds, but answers mean nothing")
    demo.add_argument(
        "--unified", action="store_true", help="one unified worker instead of a pair, and an adapter for all positions"
    )
    demo.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="device of its engines; default: cpu")

    completion = add("completion", _completion, 'Print a completion script: eval "$(prelude completion bash)".')
    completion.add_argument("shell", choices=("bash", "zsh", "tcsh"))

    return parser


def _completion(arguments: argparse.Namespace) -> None:
    import shtab

    print(shtab.complete(_parser(), arguments.shell))


def _up(arguments: argparse.Namespace) -> None:
    with ctrl_c_ends_process():
        from cluster.config.load import load_cluster_config
        from cluster.local.running import only_one, record_of
        from cluster.local.supervisor import run_until_stopped

        config = load_cluster_config(arguments.config)
        _check_certificates(config, arguments.config)
        if note := _identity_note(config, arguments.config):
            print(note, flush=True)
        logs = arguments.logs or arguments.config.resolve().parent / "logs"
        print(f"Starting {len(config.workers)} workers and the router.", flush=True)
        record = record_of(arguments.config)
        with only_one(arguments.config):
            asyncio.run(run_until_stopped(config, logs, lambda line: print(line, flush=True), record))


def _identity_note(config: ClusterConfig, path: Path) -> str:
    """What to say about who may use the router. Raises ConfigError if that is nobody, or anybody by mistake."""
    from cluster.config.load import located
    from router.identity.startup import check_identity

    with located(path):
        return check_identity(config)


def _check_certificates(config: ClusterConfig, path: Path, process: str | None = None) -> None:
    """Check the certificates of one process, or of all of cluster.yaml. Raises ConfigError."""
    from cluster.config.certificates import check_cluster, check_process
    from cluster.config.load import located

    with located(path):
        if process is None:
            check_cluster(config)
        else:
            check_process(config, process)


def _router(arguments: argparse.Namespace) -> None:
    with ctrl_c_ends_process():
        from cluster.config.load import load_cluster_config
        from process import log

        config = load_cluster_config(arguments.config)
        _check_certificates(config, arguments.config, "router")
        log.setup("router", config.log_level)
        if note := _identity_note(config, arguments.config):
            logging.getLogger("router").warning(note)
        from router.server import run

    run(config)


def _worker(arguments: argparse.Namespace) -> None:
    with ctrl_c_ends_process():
        from process.lifetime import import_grpc_without_fork_handlers

        import_grpc_without_fork_handlers()  # before any import below brings it in
        from cluster.config.load import load_cluster_config
        from process import log

        config = load_cluster_config(arguments.config)
        config = _with_this_worker(config, arguments)
        _check_certificates(config, arguments.config, arguments.name)
        log.setup(arguments.name, config.log_level)
        from cluster.agent.engine_spec import PEER_ROLES, check_socket_paths
        from cluster.agent.worker_agent import run_agent
        from cluster.local.gpus import with_host_gpus
        from cluster.local.ports import bound_listener

        worker = config.workers[arguments.name]
        config = with_host_gpus(config, worker.host)
        bound_listener(f"workers.{arguments.name}.metrics_port", worker.host, worker.metrics_port).close()

        may_change = config.roles_may_change and arguments.role in PEER_ROLES
        for role in PEER_ROLES if may_change else (arguments.role,):
            _agent_class(role)  # what it imports takes a second, which is not for a change of role

    def run_in(scratch: Path) -> None:
        def made(role: str) -> WorkerAgent:
            agent = _agent_class(role)(config, arguments.name, scratch)
            agent.successor = made if may_change else None
            return agent

        check_socket_paths(arguments.name, scratch)
        run_agent(made(arguments.role))

    if arguments.scratch is not None:
        run_in(arguments.scratch.resolve())
        return
    from adapters.files.locked_folder import LockedFolder, sweep_abandoned

    temporary = Path(tempfile.gettempdir())
    sweep_abandoned(_SCRATCH_PREFIX, temporary)  # left by killed workers
    # The prefix is short: the folder holds engines' sockets, whose paths have a length limit.
    with contextlib.closing(LockedFolder(_SCRATCH_PREFIX, arguments.role, temporary)) as folder:
        run_in(folder.path)


def _with_this_worker(config: ClusterConfig, arguments: argparse.Namespace) -> ClusterConfig:
    """The configuration with the worker that these arguments name. Raises ConfigError."""
    name, role, where = arguments.name, arguments.role, arguments.config
    worker = config.workers.get(name)
    if worker is not None and worker.role == role:
        if arguments.host is not None:
            raise ConfigError(f"--host: workers.{name} of {where} has it; change it there")
        return config
    discovery = config.discovery.by_role.get(role)
    if worker is not None or discovery is None:
        names = ", ".join(config.workers_of(role)) or "none"
        raise ConfigError(
            f"{where}: there is no {role} worker called {name!r}; there is {names}"
            + (
                ""
                if worker is not None
                else f", and discovery.{role} is not set, so that nobody would find another one"
            )
        )
    from cluster.local.found_worker import with_found_worker

    return with_found_worker(config, name, role, arguments.host)


def _agent_class(role: str) -> type[WorkerAgent]:
    """The agent class of a role. Imports no other role."""
    match role:
        case "prefill":
            from prefill_worker.agent import PrefillAgent

            return PrefillAgent
        case "unified":
            from prefill_worker.unified_agent import UnifiedAgent

            return UnifiedAgent
        case _:
            from decode_worker.agent import DecodeAgent

            return DecodeAgent


def _demo(arguments: argparse.Namespace) -> None:
    config = arguments.folder / "cluster.yaml"
    if config.exists():  # nothing is imported for it
        print(config)
        return
    from cluster.errors import StartError
    from cluster.local.demo import make_demo
    from cluster.local.pretrained import pretrained_file

    folder, device, is_unified = arguments.folder, arguments.device, arguments.unified
    file = None if arguments.toy else pretrained_file()
    if file:
        print("Writing the demo's model: half a minute, once.", file=sys.stderr)
    elif not arguments.toy:
        print("The demo's model is not installed (requirements/demo.txt): it has random weights.", file=sys.stderr)
    try:
        print(make_demo(folder, file, device, is_unified=is_unified))
    except ImportError as error:
        raise StartError(f"{error.name} is not installed; `make setup` installs what a demo needs") from error


if __name__ == "__main__":
    main()
