"""Runs clients of OpenAI's API, unmodified, against a cluster, and says which of their answers are right.

    python tests/cluster/clients/run.py http://127.0.0.1:8000 --model demo --adapter pirate [CLIENT ...]

Each client in Python gets a virtual environment of its own, because they need different releases of `openai`. Those in
JavaScript share one folder, with a Node of their own; `npm` must be there. Both are kept in `--folder`. The adapter's
answer to the prompt must not be the base model's. With keys, set PRELUDE_KEY.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

HERE = Path(__file__).parent
OPENAI = "openai==3.57.0"
PYTHON = {
    "openai": (OPENAI,),
    "langchain": ("langchain-openai==1.7.4", OPENAI),
    "llama_index": ("llama-index-llms-openai-like==0.8.1",),
    "litellm": ("litellm==1.110.2",),
    "pydantic_ai": ("pydantic-ai-slim[openai]==2.68.0",),
    "instructor": ("instructor==1.17.0",),
    "smolagents": ("smolagents[openai]==1.26.0",),
    "openai_agents": ("openai-agents==0.24.0",),
}
NODE = {"openai_node": "with_openai.mjs", "ai_sdk": "with_ai_sdk.mjs"}
CITIES = ("Rome", "Oslo")
MAX_TOKENS = 200
TIMEOUT_S = 600
CANNOT_BE_INSTALLED = 3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("url", help="of the router, without /v1")
    parser.add_argument("clients", nargs="*", metavar="CLIENT", help=", ".join([*PYTHON, *NODE]) + "; default: all")
    parser.add_argument("--model", default="demo", help="the base model's name")
    parser.add_argument("--adapter", default="pirate")
    parser.add_argument("--prompt", default="Tell me about the sea.")
    parser.add_argument("--folder", type=Path, default=Path(".prelude/clients"), help="where clients are installed")
    options = parser.parse_intermixed_args()
    if unknown := set(options.clients) - {*PYTHON, *NODE}:
        parser.error(f"there is no client {', '.join(sorted(unknown))}")
    base, adapted = (reference(options.url, model, options.prompt) for model in (options.model, options.adapter))
    if base == adapted:
        parser.error(f"{options.adapter} answers {options.prompt!r} as {options.model} does: {base!r}")
    asked = {"URL": f"{options.url}/v1", "MODEL": options.model, "ADAPTER": options.adapter, "PROMPT": options.prompt}
    environment = {**os.environ, **{f"PRELUDE_{name}": value for name, value in asked.items()}}
    num_wrong = 0
    for client in options.clients or [*PYTHON, *NODE]:
        try:
            command = installed(client, options.folder.resolve())
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"{client} cannot be installed: {error}", file=sys.stderr)
            return CANNOT_BE_INSTALLED
        found = subprocess.run(
            command, env=environment, stdout=subprocess.PIPE, text=True, timeout=TIMEOUT_S, check=True
        ).stdout
        num_wrong += report(client, map(json.loads, found.splitlines()), adapted)
    return 1 if num_wrong else 0


def reference(url: str, model: str, prompt: str) -> str:
    """The answer by plain HTTP."""
    messages = [{"role": "user", "content": prompt}]
    body = {"model": model, "messages": messages, "max_tokens": MAX_TOKENS, "temperature": 0}
    headers = {"content-type": "application/json", "authorization": f"Bearer {os.environ.get('PRELUDE_KEY', 'none')}"}
    with urlopen(Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers), timeout=120) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]


def installed(client: str, folder: Path) -> list[str | Path]:
    """The command that runs the client's file, once what it needs is in `folder`."""
    if client in PYTHON:
        home = folder / client
        pins = "\n".join(PYTHON[client])
        if not (home / "pins").exists() or (home / "pins").read_text() != pins:
            venv.create(home, clear=True, with_pip=True)
            install = [home / "bin/python", "-m", "pip", "install", "--quiet", *PYTHON[client]]
            subprocess.run(install, check=True, stdout=sys.stderr)
            (home / "pins").write_text(pins)
        return [home / "bin/python", HERE / f"with_{client}.py"]
    home = folder / "node"
    home.mkdir(parents=True, exist_ok=True)
    for file in [HERE / "package.json", *HERE.glob("*.mjs")]:  # modules are looked for beside who imports them
        shutil.copy(file, home)
    npm = ["npm", "install", "--no-audit", "--no-fund", "--silent"]
    subprocess.run(npm, cwd=home, check=True, stdout=sys.stderr)
    return [home / "node_modules/.bin/node", home / NODE[client]]


def report(client: str, found: Iterable[dict[str, Any]], expected: str) -> int:
    """Print a line for each check. Returns how many were wrong."""
    num_wrong, wholes = 0, {}
    for each in found:
        check, value = each["check"], each.get("value")
        wrong = each["error"] if "error" in each else what_is_wrong(check, value, expected)
        if not wrong and ("tools" in check or "json" in check):  # whole and streamed agree
            whole = wholes.setdefault(check.removesuffix("_stream"), value)
            if any(value[name] != whole[name] for name in value):
                wrong = f"{value}, but not streamed {whole}"
        num_wrong += bool(wrong)
        print(f"{client:14} {check:22} {wrong or 'right'}", flush=True)
        if wrong and "trace" in each:
            print(each["trace"], file=sys.stderr)
    return num_wrong


def what_is_wrong(check: str, value: Any, expected: str) -> str:
    """Empty if the value is what the check should find."""
    if "json" in check:
        right = set(value) == {"there", "back"} and is_weather(value["there"]) and value["back"] in (*CITIES, None)
    elif "tools" in check:
        right = value["name"] == "get_weather" and is_weather(value["arguments"])
        right = right and isinstance(value.get("after", ""), str)
    elif check == "agent":
        right = isinstance(value, str)
    elif "stream" in check:
        right = len(value) > 1 and "".join(value) == expected
    else:
        right = value == expected
    return "" if right else f"{value!r}, expected {expected!r}"


def is_weather(value: Any) -> bool:
    """Whether it is what the tool's schema asks."""
    if not isinstance(value, dict):
        return False
    city, celsius, note = value.get("city"), value.get("celsius"), value.get("note")
    right = city in CITIES and isinstance(celsius, bool) and isinstance(note, str) and len(note) <= 12
    return right and len(value) == 3


if __name__ == "__main__":
    sys.exit(main())
