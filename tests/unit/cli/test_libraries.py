"""Commands print no warnings, notices or progress of libraries and of pip, but their errors."""

import importlib
import logging
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from support.adapters.tiny_model import write_model_config

from cli.libraries import needing, quiet_libraries
from cli.main import main
from cluster.agent import worker_agent
from cluster.local import demo
from process import log

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
def test_the_commands_that_import_the_most(tmp_path: Path):
    """transformers, torchao, torch and peft print a lot when `demo` and `verify` use them."""
    folder = tmp_path / "demo"
    script = (
        "from cli.main import main; import sys; folder = sys.argv[1]; main(['demo', folder, '--toy']); "
        "main(['adapters', 'verify', f'{folder}/adapters/a0', '--config', f'{folder}/cluster.yaml'])"
    )
    variables = {name: value for name, value in os.environ.items() if name != "HF_HUB_DISABLE_PROGRESS_BARS"}
    done = subprocess.run(
        [sys.executable, "-c", script, str(folder)], capture_output=True, text=True, env=variables, timeout=300
    )
    assert (done.returncode, done.stderr) == (0, "")
    first, second, *_ = done.stdout.splitlines()
    assert (first, second) == (f"{folder}/cluster.yaml", f"{folder}/adapters/a0 loads here")


def test_errors_show(caplog: pytest.LogCaptureFixture):
    library = logging.getLogger("torchao")
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with quiet_libraries():
            library.warning("a notice")
            library.error("a failure")
            warnings.warn("old", DeprecationWarning, stacklevel=1)
        library.warning("a notice afterwards")
        warnings.warn("old afterwards", DeprecationWarning, stacklevel=1)
    assert [record.getMessage() for record in caplog.records] == ["a failure", "a notice afterwards"]
    assert [str(each.message) for each in warned] == ["old afterwards"]


def test_servers_log_warnings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "cluster.yaml").write_text("model: {path: ., name: demo}\nworkers: {u: {role: unified}}\n")
    write_model_config(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(log, "setup", lambda *_: None)
    disabled: dict[str, bool] = {}

    def note(command: str) -> None:
        disabled[command] = not logging.getLogger(command).isEnabledFor(logging.WARNING)

    monkeypatch.setattr(worker_agent, "run_agent", lambda _agent: note("worker"))
    monkeypatch.setattr(demo, "make_demo", lambda *_, **__: note("demo"))
    main(["unified-worker", "--name", "u"])
    main(["demo", "somewhere", "--toy"])
    assert disabled == {"worker": False, "demo": True}


@pytest.mark.parametrize("fails", [False, True])
def test_pip_output_is_shown_when_it_fails(tmp_path: Path, fails: bool):
    """`make setup` with a pip that warns: nothing is shown unless pip fails, then everything."""
    tools = tmp_path / "venv" / "bin"
    tools.mkdir(parents=True)
    pip = f"#!/bin/sh\necho 'WARNING: running pip as root' >&2\n{'echo ERROR: no space >&2; exit 1' if fails else ''}\n"
    for name, script in (("pip", pip), ("python", "#!/bin/sh\n")):
        (tools / name).write_text(script)
        (tools / name).chmod(0o755)
    done = subprocess.run(
        ["make", f"VENV={tmp_path}/venv", f"PYTHON={sys.executable}", "setup"],
        cwd=ROOT, capture_output=True, text=True, timeout=120, env={"PATH": os.environ["PATH"]},
    )  # fmt: skip
    assert "1/3 torch" in done.stdout
    if fails:
        assert done.returncode != 0
        assert "WARNING: running pip as root\nERROR: no space\n" in done.stderr
    else:
        assert (done.returncode, done.stderr) == (0, "")
        assert "3/3 Prelude" in done.stdout


def test_a_fault_of_ours_is_no_missing_library():
    with pytest.raises(ModuleNotFoundError), needing():
        importlib.import_module("training.nothing")
