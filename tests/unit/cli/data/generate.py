"""Record what the command line of 0.1.0 (commit 8f84249) took and answered, in a checkout of it:

PYTHONPATH=. .venv/bin/python /path/to/generate.py

Every command runs twice, in new folders and as different users: what differs is recorded by its type.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[3]))

from adapters.base_model import BaseModel
from adapters.random_adapters import write_random_lora
from cluster.cli import _parser, main
from support.bench.recorded_commands import arguments_of, run
from support.routers.recorded_answers import recorded

MODEL = {
    "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2, "hidden_size": 8, "intermediate_size": 16,
    "num_attention_heads": 2, "vocab_size": 100,
}  # fmt: skip
CLUSTER = "model: {path: model, name: demo}\nworkers:\n  u: {role: unified}\nadapter_limits: {max_rank: 4}\n"
COMMANDS = """
list | list --json | import bot lora-1 --json | import bot lora-1 | import bot lora-2 --tag prod --json
import bot lora-3 --keep-latest --json | import acme/legal lora-1 --json | list --json | list
list --tenant acme --json | list --prefix b --json | list --deleted --json | show bot --json | show bot
show acme/legal --json | alias bot@prod r1 --json | alias bot@prod r3 | alias bot@new r1 --json | history bot --json
history bot | history bot --alias prod --json | history bot --alias prod --limit 1 --json | rollback bot@prod --json
rollback bot@prod | rollback acme/legal --json | verify lora-1 --no-model --json | verify too-large --no-model --json
verify none | verify too-large --config cluster.yaml --json | verify lora-1 --config cluster.yaml
verify lora-1 --model model --json
export bot out --json | export bot@prod prod | export bot out | delete bot --json | delete bot | show bot | list --json
list --deleted --json | restore bot --json | restore bot | restore none --json | delete acme/legal | gc --json | gc
gc --older-than 1h --json | gc --older-than soon | fsck --json | fsck | fsck --no-content --json
fsck --repair --min-age 1h --json | import bot none | import bot too-large | import a/b/c lora-1 | import demo lora-1
import bot | show none | show none --json | alias bot@prod r9 | alias bot r1 --json | alias bot@prod prod
rollback bot@none | history bot --alias none | export none out2 | history bot --limit 0 | nothing
list --config none.yaml | list --unknown | show
""".replace("\n", "|")


def fill(folder: Path) -> None:
    """The folder in which the commands run: a cluster.yaml, a model and directories of adapters."""
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(MODEL))
    (folder / "cluster.yaml").write_text(CLUSTER)
    base = BaseModel.read(folder / "model")
    for seed in (1, 2, 3):
        write_random_lora(folder / f"lora-{seed}", base, seed, rank=2)
    write_random_lora(folder / "too-large", base, 1, rank=8)


def answers(commands: list[list[str]], user: str) -> list[dict[str, Any]]:
    os.environ["LOGNAME"] = os.environ["USER"] = user
    with tempfile.TemporaryDirectory() as name:
        fill(Path(name))
        os.chdir(name)
        found = [run(main, ["adapters", *command]) for command in commands]
        os.chdir("/")
    return found


if __name__ == "__main__":
    commands = [command.split() for command in COMMANDS.split("|") if command.strip()]
    one = answers(commands, "ann")
    time.sleep(1.1)  # until another second
    pairs = zip(commands, one, answers(commands, "bob"), strict=True)
    runs = [{"command": " ".join(words), **recorded(*both)} for words, *both in pairs]
    arguments = arguments_of(_parser())
    of_commands = ",\n".join(f"{json.dumps(name)}: {json.dumps(each)}" for name, each in arguments.items())
    lines = ",\n".join(map(json.dumps, runs))
    record = f'{{"files": {json.dumps({"config.json": MODEL, "cluster.yaml": CLUSTER})},\n'
    record += f'"arguments": {{\n{of_commands}}},\n"runs": [\n{lines}]}}\n'
    Path(__file__).with_name("commands-0.1.0.json").write_text(record)
