"""The command line takes and answers what that of 0.1.0 did (data/generate.py); it may take and answer more."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.bench.recorded_commands import arguments_of, run
from support.routers.recorded_answers import differences

from adapters.model.base_model import BaseModel
from cli.main import _parser, main
from samples.random_adapters import write_random_lora

RECORD = json.loads((Path(__file__).parent / "data" / "commands-0.1.0.json").read_text())
ARGUMENTS = {(command, name): each for command, all_ in RECORD["arguments"].items() for name, each in all_.items()}
# Changed on purpose, with an entry in the changelog: every object of a store has a signature of 64 bytes now.
CHANGED = {"fsck": "num_bytes"}


def changes(then: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Why a command line that was right might not be any more, or mean something else."""
    same = ("num_values", "default")
    found = [f"{what} is {now[what]!r}, was {then[what]!r}" for what in same if now[what] != then[what]]
    if now["required"] and not then["required"]:
        found.append("it is required")
    if now["choices"] is not None and not set(then["choices"] or [None]) <= set(now["choices"]):
        found.append(f"choices are {now['choices']}, were {then['choices']}")
    return found


def test_arguments_are_as_they_were() -> None:
    now = arguments_of(_parser())
    for (command, name), then in ARGUMENTS.items():
        assert not changes(then, now[command][name]), (command, name)


def test_what_changes_an_argument_is_found() -> None:
    then = ARGUMENTS["adapters prewarm", "--tier"]
    assert then["choices"] == ["host", "disk"]
    assert not changes(then, {**then, "choices": ["host", "disk", "slot"]})
    for change in ({"choices": ["host"]}, {"default": "disk"}, {"required": True}, {"num_values": "*"}):
        assert changes(then, {**then, **change}), change
    free = ARGUMENTS["up", "--logs"]
    assert changes(free, {**free, "choices": ["logs"]})


def test_no_argument_is_newly_required() -> None:
    for command, arguments in arguments_of(_parser()).items():
        required = {name for name, each in arguments.items() if each["required"]}
        if command in RECORD["arguments"]:
            assert required <= RECORD["arguments"][command].keys(), command


@pytest.mark.slow
def test_commands_answer_as_they_did(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("model").mkdir()
    for name, path in (("config.json", "model/config.json"), ("cluster.yaml", "cluster.yaml")):
        content = RECORD["files"][name]
        Path(path).write_text(content if isinstance(content, str) else json.dumps(content))
    base = BaseModel.read(Path("model"))
    for seed in (1, 2, 3):
        write_random_lora(Path(f"lora-{seed}"), base, seed, rank=2)
    write_random_lora(Path("too-large"), base, 1, rank=8)
    found = {}
    for number, each in enumerate(RECORD["runs"]):
        words = each["command"].split()
        expected = {name: value for name, value in each.items() if name != "command"}
        if words[0] in CHANGED and isinstance(each["printed"], dict):
            assert expected["printed"].pop(CHANGED[words[0]])
        if lines := differences(run(main, ["adapters", *words]), expected):
            found[number, each["command"]] = lines
    assert not found
