"""`prelude init`: writes a first cluster.yaml for a model and this host."""

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

from cli.bench.arguments import lengths, not_negative, positive
from cluster.errors import ConfigError


def add_commands(commands: Any) -> None:
    """Add `init` to the command line."""
    text = "Write a cluster.yaml for a model and this host, with computed memory budgets and their arithmetic."
    command = commands.add_parser("init", help=text, description=text)
    command.set_defaults(run=_init)
    command.add_argument(
        "--model",
        required=True,
        metavar="MODEL",
        help="a Hugging Face model directory, a GGUF file, or OWNER/REPOSITORY[@REVISION][/FILE.gguf] of the Hub",
    )
    command.add_argument(
        "--gpus", type=not_negative, metavar="N", help="GPUs to use, 0 for none; default: all of this host"
    )
    command.add_argument("--tensor-parallel", type=positive, default=1, metavar="N", help="GPUs per worker; default: 1")
    command.add_argument(
        "--lengths",
        type=lengths,
        default=(2048, 128),
        metavar="P+G",
        help="mean tokens of prompts and answers, which decide how many workers of each role there are on four GPUs or "
        "more; default: 2048+128",
    )
    command.add_argument("--unified", action="store_true", help="unified workers only, one per --tensor-parallel GPUs")
    command.add_argument(
        "--with-all-positions",
        action="store_true",
        help="a unified worker beside the pairs, for adapters that act on all positions",
    )
    command.add_argument(
        "--config", type=Path, default=Path("cluster.yaml"), help="the file to write; default: ./cluster.yaml"
    )


def _init(arguments: argparse.Namespace) -> None:
    from adapters.errors import BaseModelInvalid
    from cluster.agent.engine_spec import base_model_of, fitted_spec
    from cluster.config.load import load_cluster_config
    from cluster.local.initial_config import Pools, initial_config
    from cluster.local.memory_plan import ModelSizes
    from cluster.local.named_model import model_of_option
    from cluster.planning.split import best_split, gpu_named

    path = arguments.config
    if path.exists():
        raise ConfigError(f"{path} exists; remove it, or name another file with --config")
    if not path.parent.is_dir():
        raise ConfigError(f"there is no folder {path.parent}")
    model = model_of_option(arguments.model)
    try:
        sizes = ModelSizes.read(model)
    except BaseModelInvalid as error:
        raise ConfigError(f"--model: {error}") from error
    host = _host(arguments)
    if host.num_gpus == 0 and arguments.tensor_parallel > 1:
        raise ConfigError(f"--tensor-parallel {arguments.tensor_parallel} divides a model among GPUs; there are none")
    pools = Pools.chosen(
        host.num_gpus,
        arguments.tensor_parallel,
        arguments.unified,
        arguments.with_all_positions,
        lambda num_workers: best_split(
            sizes, gpu_named(host.gpu_name), arguments.tensor_parallel, num_workers, arguments.lengths
        ),
    )
    text = initial_config(model, sizes, host, pools)
    try:
        with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
            partial = Path(file.name)
            file.write(text)
        try:
            config = load_cluster_config(partial)
            for name in config.workers:
                fitted_spec(config, name, partial.parent, base_model_of(config))
            partial.chmod(0o644)
            os.link(partial, path)  # another process may have made it meanwhile
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}; name another file with --config") from error
    print(f"{path}: {', '.join(config.workers)}. Next: prelude up --config {path}")


def _host(arguments: argparse.Namespace) -> Any:
    """This host, with as many GPUs as are to be used. Raises ConfigError and StartError."""
    from cluster.local.gpus import list_gpus
    from cluster.local.initial_config import Host

    if arguments.gpus == 0:
        return Host.this(0, None)
    available = list_gpus(os.environ)
    wanted = len(available.gpus) if arguments.gpus is None else arguments.gpus
    if wanted > len(available.gpus):
        raise ConfigError(
            f"--gpus asks for {wanted}; this host has {available}. `prelude plan --cluster-yaml` is for other hosts"
        )
    used = available.gpus[:wanted]
    known = [gpu.memory_bytes for gpu in used if gpu.memory_bytes]
    smallest = min(known) if known and len(known) == wanted else None
    return Host.this(wanted, smallest, used[0].name if used else "")
