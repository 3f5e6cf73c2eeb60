"""A reader who follows the pages: what stands for their own names, and runs each command as the page has it."""

import os
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from support.documents.not_run import reasons_of
from support.documents.pages import commands_of

TUTORIAL = "docs/tutorial-train-and-serve.md"
COMMAND_WITHIN_S = 3000.0
DEMO = ".prelude/demo"
# What stands for a reader's own names: on all pages, in the folder of the demo, unless a page is below.
WORDS = {
    r"\bMODEL\b": "model",
    r"\bMODEL_DIRECTORY\b": "model",
    r"\bDIRECTORY\b": "my-lora",
    r"\bKEY_ID\b": "$(prelude keys list | tail -n 1 | cut -d ' ' -f 1)",
    r"\bprefill-1\b": "prefill-0",
    r"\./my-lora --model /models/llama-3.1-8b\b": f"{DEMO}/my-lora --model {DEMO}/model",
    r"/models/llama-3.1-8b\b": f"{DEMO}/model",
    r"acme/legal \./my-lora$": f"acme/legal {DEMO}/my-lora",
    r"convert \./my-lora": "convert ../../samples/demo/adapters/pirate-all",  # for all positions
    r"file=@": "file=@my-lora/",
    r"/mnt/backup": "backup",
}
IN_THE_CHECKOUT = ("README.md", "CONTRIBUTING.md", "docs/observability.md", "docs/kubernetes.md")  # not in the demo
# Options for what would take hours here, or has a file of its own.
ADDED = {
    r"prelude init --model model": "--config new.yaml",
    r"prelude bench load .*punica": "--num-requests 1 --warmup-requests 0 --adapters 1 --timeout-s 3000",
    r"prelude bench load .*--sweep": "--sweep 0.5 --duration-s 2 --random-input-len 8 --random-output-len 2",
    r"prelude bench load .*--adapters": "--adapters 4 --duration-s 1 --random-input-len 8 --random-output-len 2",
    r"prelude bench load --url \S+ *(#|$)": "--num-requests 2 --random-input-len 8 --random-output-len 2",
    r"prelude bench simulate": "--gpus 2 --seconds 2",
    r"prelude train sft --model model": "--max-steps 1 --batch-size 1",
    r"prelude train eval --model model": "--rows 1",
    r"prelude adapters convert": "--steps 1 --answer-tokens 4 --min-agreement 0",
}
PRINTED = {
    r"prelude doctor": r"(?m)^ok +hooks +all \d+ hooks of cpu engines fit this SGLang$",
    r"prelude init": r": prefill-0, decode-0(, unified-0)?\. Next: prelude up",
    r"prelude keys create": r"prelude_\w+",
    r"prelude workers list": r"prefill-0",
    r"prelude plan": r"x h200: ",
    r"prelude adapters verify": r"Self-check",
    r"prelude train eval": r"exact match",
    r"curl -F name": r'"alias": ?"latest"',
    r"curl -F memory_only": r'"workers": ?\{"prefill-0": ?\d',
    r"openssl pkey": r"BEGIN PUBLIC KEY",
    r"sed ": r"(?m)expr: .* / 0\.01$",
}


def chosen(table: dict[str, str], command: str) -> str:
    """Of the entry that matches, or nothing."""
    found = [value for pattern, value in table.items() if re.match(pattern, command)]
    return found[0] if found else ""


def with_words(command: str) -> str:
    for pattern, word in WORDS.items():
        command = re.sub(pattern, word, command)
    return command


def as_typed(command: str) -> str:
    """With this desk's words and options."""
    command = with_words(command)
    added = chosen(ADDED, command)
    return f"{command.partition(' #')[0]} {added}" if added else command


@dataclass
class Desk:
    """Where a reader sits: a fresh checkout, and the port of its demo. `exported`: commands before each other one."""

    checkout: Path
    port: int
    exported: list[str] = field(default_factory=list)

    @property
    def environment(self) -> dict[str, str]:
        """Without this environment's own programs and modules."""
        own = Path(sys.executable).parent
        path = [each for each in os.environ["PATH"].split(":") if Path(each) != own]
        url = f"http://127.0.0.1:{self.port}"
        return {**os.environ, "PATH": ":".join(path), "PYTHONPATH": "", "VIRTUAL_ENV": "", "URL": url}

    def run(self, command: str, folder: str = ".") -> str:
        """What the command prints; it has to succeed. The demo's port is put in place of the page's."""
        command = command.replace("http://127.0.0.1:8000", f"http://127.0.0.1:{self.port}")
        script = "\n".join(["set -eo pipefail", *self.exported, command])
        done = subprocess.run(
            ["bash", "-c", script], cwd=self.checkout / folder, env=self.environment, capture_output=True, text=True,
            timeout=COMMAND_WITHIN_S,
        )  # fmt: skip
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def follow(self, page: str, command: str, folder: str) -> str:
        """Run a command of a page as it is typed here. It prints what it should; the output."""
        command = as_typed(command)
        printed = self.run(command, folder)
        assert re.search(chosen(PRINTED, command), printed), f"{page}: {command}\n{printed}"
        return printed


def commands_to_run(page: str) -> list[str]:
    return [command for command in commands_of(page) if not reasons_of(command)]


def needs_workers(page: str) -> bool:
    return any(re.search(r"127\.0\.0\.1:8000|\$URL|prelude workers", each) for each in commands_to_run(page))
