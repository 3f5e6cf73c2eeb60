"""Processes end when they should. Ctrl-C is never lost: not during imports, and not before its handler is there."""

import asyncio
import signal
import subprocess
import sys

import pytest

from process.lifetime import ctrl_c_ends_process, end_processes, how_ended, meanwhile, stop_signal

# Python calls some code of the import system where it can only print a KeyboardInterrupt and go on.
SWALLOWED_IN_AN_IMPORT = """
import signal, sys
from cli import main as cli
from cluster.config import load as config_file

def load_cluster_config(path):
    try:
        signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt:
        pass
    print("lost")
    sys.exit(0)

config_file.load_cluster_config = load_cluster_config
cli.main(sys.argv[1:])
"""


@pytest.mark.parametrize(
    ("code", "how"),
    [(0, "with code 0"), (3, "with code 3"), (-9, "by SIGKILL"), (-11, "by SIGSEGV"), (-40, "by signal 40")],
)
def test_an_end_by_a_signal_has_its_name(code: int, how: str):
    assert how_ended(code) == how


@pytest.mark.parametrize("command", ["up", "router", "prefill-worker --name p"])
@pytest.mark.slow
def test_servers_end_at_a_ctrl_c_that_python_would_swallow(command: str):
    script = [sys.executable, "-c", SWALLOWED_IN_AN_IMPORT, *command.split()]
    ended = subprocess.run(script, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (-signal.SIGINT, ""), ended.stderr


def test_ctrl_c_is_an_exception_again_afterwards():
    with ctrl_c_ends_process():
        assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_an_ignored_ctrl_c_stays_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with ctrl_c_ends_process():
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stop_signal_counts_from_the_call_on(number: signal.Signals):
    async def stopped() -> signal.Signals:
        stop = stop_signal()
        signal.raise_signal(number)
        return await asyncio.wait_for(stop, 120)

    before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        assert asyncio.run(stopped()) == number
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


async def test_processes_end_by_sigterm_and_those_that_ignore_it_by_the_kill():
    polite = await asyncio.create_subprocess_exec("sleep", "600")
    gone = await asyncio.create_subprocess_exec("true")
    await gone.wait()
    await end_processes([polite, gone], 60, asyncio.subprocess.Process.kill)
    assert (polite.returncode, gone.returncode) == (-signal.SIGTERM, 0)

    deaf = await asyncio.create_subprocess_exec(
        "sh", "-c", "trap '' TERM; echo; exec sleep 600", stdout=asyncio.subprocess.PIPE
    )
    assert deaf.stdout is not None
    await deaf.stdout.readline()
    await end_processes([deaf], 0.1, asyncio.subprocess.Process.kill)
    assert deaf.returncode == -signal.SIGKILL


async def test_work_runs_during_a_block_and_has_ended_after_it():
    said: list[str] = []
    begun = asyncio.Event()

    async def work() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)  # its end takes a while
            said.append("ended")

    async def fails() -> None:
        raise ValueError("no end of the block")

    async def block() -> None:
        async with meanwhile(work(), fails()):
            await begun.wait()
            said.append("in the block")
            raise KeyError

    with pytest.raises(KeyError):
        await block()
    assert said == ["in the block", "ended"]
    assert asyncio.all_tasks() == {asyncio.current_task()}
