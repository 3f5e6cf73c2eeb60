"""The command line: help, version, completion; each role has a worker command, and each runs its own agent."""

import os
import re
import signal
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from support.adapters.tiny_model import write_model_config

from adapters.files.locked_folder import LockedFolder
from cli.main import main
from cluster.agent import worker_agent
from cluster.agent.worker_agent import WorkerAgent
from cluster.local.running import only_one
from process import log
from process.free_ports import bound_socket

CLUSTER = """\
model: {path: ., name: demo}
workers:
  p: {role: prefill}
  d: {role: decode}
  u: {role: unified}
"""
AGENTS = {"prefill": "PrefillAgent", "decode": "DecodeAgent", "unified": "UnifiedAgent"}


@pytest.fixture
def agents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[WorkerAgent]:
    """The agents that would have run. The working directory has a cluster.yaml."""
    ran: list[WorkerAgent] = []
    write_model_config(tmp_path)
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(log, "setup", lambda *_: None)
    monkeypatch.setattr(worker_agent, "run_agent", ran.append)
    return ran


@pytest.mark.parametrize("role", AGENTS)
def test_each_role_runs_its_agent(role: str, agents: list[WorkerAgent]):
    main([f"{role}-worker", "--name", role[0]])
    (agent,) = agents
    assert (type(agent).__name__, agent.role, agent.name) == (AGENTS[role], role, role[0])


@pytest.mark.parametrize("role", AGENTS)
def test_a_worker_of_another_role_is_not_run(role: str, agents: list[WorkerAgent], capsys):
    other = "d" if role != "decode" else "u"
    with pytest.raises(SystemExit) as caught:
        main([f"{role}-worker", "--name", other])
    assert f"no {role} worker called '{other}'; there is {role[0]}" in capsys.readouterr().err
    assert caught.value.code == 2
    assert agents == []


def test_a_worker_whose_port_is_taken_says_so(agents: list[WorkerAgent], capsys):
    with bound_socket() as taken:
        taken.listen()
        port = taken.getsockname()[1]
        Path("cluster.yaml").write_text(CLUSTER.replace("{role: decode}", f"{{role: decode, metrics_port: {port}}}"))
        with pytest.raises(SystemExit, match="2"):
            main(["decode-worker", "--name", "d"])
    why = f"workers.d.metrics_port: 127.0.0.1:{port} is not available (Address already in use); choose another"
    assert capsys.readouterr().err == f"prelude: {why}\n"
    assert agents == []


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A folder in which paths of engines' sockets are short enough, whatever pytest calls its own."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


def test_scratch_folders_do_not_outlive_their_workers(agents: list[WorkerAgent], short_path: Path, monkeypatch):
    temporary = short_path / "temporary"
    (temporary / "prelude-other").mkdir(parents=True)
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    given = short_path / "given"
    left = LockedFolder("prelude-scratch-", "d", temporary)
    os.close(left._descriptor)  # as by a kill
    assert left.path.is_dir()

    def run(agent: WorkerAgent) -> None:
        assert not left.path.exists()
        assert agent.scratch == given or agent.scratch.is_dir()
        agents.append(agent)

    monkeypatch.setattr(worker_agent, "run_agent", run)
    main(["decode-worker", "--name", "d"])
    main(["decode-worker", "--name", "d", "--scratch", str(given)])
    assert [agent.scratch.parent for agent in agents] == [temporary, short_path]
    assert [path.name for path in temporary.iterdir()] == ["prelude-other"]


def test_bare_prelude_prints_its_help(capsys: pytest.CaptureFixture):
    main([])
    assert capsys.readouterr().out.startswith("usage: prelude")


def test_a_group_needs_one_of_its_commands(capsys: pytest.CaptureFixture):
    with pytest.raises(SystemExit, match="2"):
        main(["adapters"])
    assert "the following arguments are required: command" in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert re.fullmatch(r"prelude \d+\.\d+\.\d+\n", capsys.readouterr().out)


def test_completion_knows_nested_commands():
    """In a real bash."""
    words = "COMP_WORDS=(prelude adapters im); COMP_CWORD=2"
    script = f'eval "$(prelude completion bash)"; {words}; _shtab_prelude; echo "${{COMPREPLY[@]}}"'
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    ran = subprocess.run(["bash", "-c", script], env={"PATH": path}, capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["import"]


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["completion", "bash"], ["adapters", "import", "--help"]])
def test_a_reader_that_leaves_sees_no_traceback(words: list[str]):
    """As with `| head -0`: what is written finds nobody."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        command = [sys.executable, "-m", "cli.main", *words]
        buffered = {**os.environ, "PYTHONUNBUFFERED": ""}  # then a little is written at the end only
        done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, env=buffered)
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


@pytest.mark.parametrize(
    ("kibibytes", "text"),
    [
        (0, "prelude: [Errno 2] No usable temporary directory found"),
        (1, "File too large; set TMPDIR to another folder"),
    ],
)
def test_a_disk_without_room_ends_a_command_in_words(kibibytes: int, text: str, short_path: Path):
    """A limit on files' sizes is in the place of a full disk; it would cut the modules that Python caches, too."""
    write_model_config(short_path)
    (short_path / "cluster.yaml").write_text(CLUSTER + "router: {port: 0}\n")
    script = f'ulimit -f {kibibytes}; exec "$0" -B -m cli.main up'
    done = subprocess.run(["bash", "-c", script, sys.executable], cwd=short_path, capture_output=True, text=True)
    assert (done.returncode, text in done.stderr, "Traceback" in done.stderr) == (1, True, False)


def test_a_file_is_run_once_at_a_time(short_path: Path):
    """The second one would begin the logs of the first one anew."""
    write_model_config(short_path)
    config = short_path / "cluster.yaml"
    config.write_text(CLUSTER + "router: {port: 0}\n")
    command = [sys.executable, "-m", "cli.main", "up", "--config", config]
    with only_one(config):
        done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr.split(";")[0]) == (1, f"prelude: {config}: another `prelude up` runs it")
    assert not (short_path / "logs").exists()
    with only_one(config):
        pass


@pytest.mark.parametrize("command", ["up", "router"])
def test_a_catalog_of_a_later_release_starts_nothing(command: str, short_path: Path):
    """As after a rollback."""
    write_model_config(short_path)
    (short_path / "cluster.yaml").write_text(CLUSTER + "router: {port: 0, auth: {}}\n")
    words = [sys.executable, "-m", "cli.main"]
    subprocess.run([*words, "catalog", "migrate"], cwd=short_path, capture_output=True, check=True)
    with closing(sqlite3.connect(short_path / ".prelude" / "catalog.db")) as catalog, catalog:
        catalog.execute("UPDATE alembic_version SET version_num = '9999'")
    done = subprocess.run([*words, command], cwd=short_path, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("prelude: the catalog's tables are at step 9999")


def test_a_closed_output_is_no_fault():
    """As with `>&-`."""
    script = 'exec "$0" -m cli.main --version >&-'
    assert subprocess.run(["sh", "-c", script, sys.executable], capture_output=True).returncode == 0
