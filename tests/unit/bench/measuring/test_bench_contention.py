"""Other processes' CPU use is measured, our own is not counted."""

import subprocess
import sys
from pathlib import Path

import psutil
from support.waiting import wait_until

from bench.measuring import provenance
from bench.measuring.contention import CpuUse, cpu_use, foreign_cores


def test_what_others_used_is_what_we_did_not():
    assert foreign_cores(CpuUse(100, 10), CpuUse(106, 14), 4) == 0.5
    assert foreign_cores(CpuUse(100, 10), CpuUse(101, 12), 4) == 0  # counters of different clocks


def test_idle_time_and_guests_are_not_counted(monkeypatch):
    times = psutil.cpu_times()
    fields = dict.fromkeys(times._fields, 1.0) | {"idle": 10.0, "iowait": 100.0, "guest": 1000.0, "guest_nice": 10000.0}
    monkeypatch.setattr(psutil, "cpu_times", lambda: type(times)(**fields))
    assert cpu_use().machine_s == len(fields) - 4


def test_own_children_are_ours():
    before = cpu_use()
    child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        wait_until(lambda: cpu_use().own_s - before.own_s >= 0.3)
    finally:
        child.kill()
        child.wait()
    assert cpu_use().own_s - before.own_s >= 0.3  # also once it has ended
    assert cpu_use().machine_s - before.machine_s > 0.2


def test_provenance_names_machine_and_versions():
    assert len(provenance.commit().removesuffix("+changes")) in (40, len("unknown"))
    hardware = provenance.hardware("cpu")
    assert hardware["cores"] >= 1
    flags = Path("/proc/cpuinfo").read_text().split()
    assert hardware["vectors"] == "unknown" or hardware["vectors"] in flags
    assert hardware["cpu"]
    assert provenance.versions()["sglang"] == "0.5.23"


def commit_all(folder: Path) -> None:
    author = ("-c", "user.name=a", "-c", "user.email=a@b")
    for words in (("init", "-q"), ("add", "-A"), (*author, "commit", "-q", "--allow-empty", "-m", "all")):
        subprocess.run(["git", "-C", str(folder), *words], check=True)


def test_the_commit_of_an_enclosing_checkout_is_not_ours(tmp_path: Path, monkeypatch):
    """As where the package is installed into the virtual environment of somebody's project."""
    installed = tmp_path / ".venv" / "site-packages"
    installed.mkdir(parents=True)
    commit_all(tmp_path)
    monkeypatch.delenv(provenance.COMMIT_VARIABLE, raising=False)
    monkeypatch.setattr(provenance, "_ROOT", installed)
    assert provenance.commit() == "unknown"
    monkeypatch.setenv(provenance.COMMIT_VARIABLE, "0123")
    assert provenance.commit() == "0123"
    monkeypatch.setattr(provenance, "_ROOT", tmp_path)
    assert len(provenance.commit()) == 40


def test_results_are_no_changes_and_all_else_is(tmp_path: Path, monkeypatch):
    """So that a benchmark which follows another one names the commit that it measured."""
    files = [tmp_path / "bench" / "results" / "a.json", tmp_path / "engine.py"]
    files[0].parent.mkdir(parents=True)
    for file in files:
        file.write_text("before")
    commit_all(tmp_path)
    monkeypatch.setattr(provenance, "_ROOT", tmp_path)
    files[0].write_text("after")
    assert len(provenance.commit()) == 40
    files[1].write_text("after")
    assert provenance.commit().endswith("+changes")
