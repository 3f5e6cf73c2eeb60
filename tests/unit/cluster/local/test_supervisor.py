"""The local supervisor: what it refuses before it starts anything, and how long processes may take to stop."""

import asyncio
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.adapters.tiny_model import write_model_config
from support.clusters.configs import config_of

from cluster import host_memory
from cluster.config.load import dump_cluster_config, load_cluster_config
from cluster.config.schema import ClusterConfig, ResidencyConfig
from cluster.errors import StartError
from cluster.host_memory import check_host_bytes, with_fitted_default
from cluster.local import gpus as gpus_module
from cluster.local import supervisor
from cluster.local.doctor.finding import error, warning
from cluster.local.gpus import Gpu, HostGpus
from cluster.local.supervisor import LocalCluster, local_cluster

TRAINER = {"url": "http://127.0.0.1:8100"}


@pytest.fixture(autouse=True)
def _temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def config_in(folder: Path, **sections) -> ClusterConfig:
    workers = sections.pop("workers", {"u": "unified"})
    return config_of(workers, write_model_config(folder), **{"router": {"port": 0}, **sections})


async def started(config: ClusterConfig, logs: Path, report: Callable[[str], None] = lambda _line: None) -> None:
    async with local_cluster(config, logs, report):
        pytest.fail("it started")


def test_workers_that_do_not_fit_start_nothing(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(gpus_module, "list_gpus", lambda _environment: HostGpus((Gpu(0, "GPU-a"),)))
    workers = {"p": {"role": "prefill", "gpus": 1}, "d": {"role": "decode", "gpus": 1}}
    config = config_in(tmp_path, engine={"device": "cuda"}, workers=workers)
    with pytest.raises(StartError, match=r"ask for 2 GPUs \(prefill 1 x 1, decode 1 x 1\); this host has 1 \(0\)"):
        asyncio.run(started(config, tmp_path / "logs"))
    assert not (tmp_path / "logs").exists()


def test_a_cluster_may_take_as_long_as_its_slowest_engine(tmp_path: Path):
    workers = {"p": {"role": "prefill"}, "d": {"role": "decode", "engine": {"start_timeout_s": 3600}}}
    longest = supervisor.ready_timeout_s(config_in(tmp_path, workers=workers))
    assert longest > 3600
    usual = supervisor.ready_timeout_s(config_in(tmp_path))
    assert usual > config_in(tmp_path).engine.start_timeout_s
    assert supervisor.ready_timeout_s(config_in(tmp_path, engine={"start_timeout_s": 10})) == 600


def test_logs_that_cannot_be_written_start_nothing(tmp_path: Path):
    (tmp_path / "file").write_text("")
    for logs in (Path("/proc/logs"), Path("/proc/self"), tmp_path / "file"):
        with pytest.raises(StartError, match=rf"logs cannot be written to {logs}: .*; name another folder with --logs"):
            asyncio.run(started(config_in(tmp_path), logs))
    assert sorted(os.listdir(tmp_path)) == ["config.json", "file"]


def test_adapters_that_are_not_there_are_named_before_the_start(tmp_path: Path):
    said: list[str] = []
    config = config_in(tmp_path, adapters={"legal": {"path": "/lgal"}})
    with pytest.raises(StartError, match="logs cannot"):
        asyncio.run(started(config, Path("/proc/logs"), said.append))
    assert said == ["adapters.legal.path: there is no folder /lgal -> correct it, or remove the entry"]


def test_what_the_doctor_calls_an_error_starts_nothing(tmp_path: Path, monkeypatch):
    findings = [error("torch is not installed", "run make"), warning("a slow disk", "buy one")]
    monkeypatch.setattr(supervisor, "quick_findings", lambda _config: findings)
    said: list[str] = []
    with pytest.raises(StartError, match="torch is not installed -> run make"):
        asyncio.run(started(config_in(tmp_path), tmp_path / "logs", said.append))
    assert said == []
    assert not (tmp_path / "logs").exists()


@pytest.mark.parametrize(
    ("name", "words", "reason"),
    [
        ("u", "print('x\\nprelude: the engine fails\\nat each start'); sys.exit(1)", "the engine fails\nat each start"),
        ("router", "print('prelude: router.port is taken'); sys.exit(2)", "router.port is taken"),
        ("trainer", "print('Traceback'); print('KeyError: 7'); sys.exit(1)", "KeyError: 7"),
        ("u", "sys.exit(1)", "it said nothing"),
    ],
)
def test_what_ends_by_itself_before_all_are_ready_ends_up(tmp_path: Path, monkeypatch, name, words, reason):
    """It is not started again: it would end again. The error has what it said."""
    monkeypatch.setattr(supervisor, "quick_findings", lambda _config: [])
    monkeypatch.setattr(supervisor, "check_socket_paths", lambda *_: None)
    monkeypatch.setattr(supervisor, "_RESTART_S", 0.0)
    launched: list[str] = []

    async def launch(cluster: LocalCluster, each: str) -> None:
        launched.append(each)
        with cluster._log_of(each).open("ab") as log:
            cluster._processes[each] = await asyncio.create_subprocess_exec(
                sys.executable,
                "-c",
                f"import sys; {words}" if each == name else "import signal; signal.pause()",
                stdout=log,
                start_new_session=True,
            )

    monkeypatch.setattr(LocalCluster, "_launch", launch)
    with pytest.raises(StartError) as caught:
        asyncio.run(asyncio.wait_for(started(config_in(tmp_path, trainer=TRAINER), tmp_path / "logs"), 120))
    assert str(caught.value) == f"{name} cannot start: {reason} (see {tmp_path}/logs/{name}.log)"
    assert launched == ["u", "router", "trainer"]


async def test_what_is_killed_before_all_are_ready_is_started_again(tmp_path: Path, monkeypatch):
    """As where memory is short for a moment."""
    monkeypatch.setattr(supervisor, "_RESTART_S", 0.0)
    cluster = LocalCluster(config_in(tmp_path), tmp_path / "logs")
    again = asyncio.Event()

    async def launch(name: str) -> None:
        again.set()

    cluster._processes["u"] = await asyncio.create_subprocess_exec(
        sys.executable, "-c", "import signal; signal.pause()", start_new_session=True
    )
    monkeypatch.setattr(cluster, "_launch", launch)
    keeper = asyncio.create_task(cluster._keep("u"))
    cluster._processes["u"].kill()
    await asyncio.wait_for(again.wait(), 120)
    keeper.cancel()
    assert cluster._failed == {}
    await cluster.stop()


def test_a_log_that_cannot_be_written_starts_nothing(tmp_path: Path):
    """Such as one of another user."""
    (tmp_path / "logs" / "u.log").mkdir(parents=True)
    with pytest.raises(StartError, match=rf"logs cannot be written to {tmp_path}/logs: Is a directory; name another"):
        asyncio.run(started(config_in(tmp_path), tmp_path / "logs"))


def test_no_worker_is_called_as_the_trainer(tmp_path: Path):
    with pytest.raises(ValueError, match=r"workers.trainer: that name is another process's certificate or folder"):
        config_in(tmp_path, workers={"trainer": {"role": "unified"}}, trainer=TRAINER)


SLOW_TO_STOP = """
import os, signal, sys, time
def stop(*_):
    time.sleep(1)
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
print("up", flush=True)
while True:
    signal.pause()
"""


@pytest.mark.slow
async def test_processes_get_their_drain_timeout_to_stop(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(supervisor, "_STOP_GRACE_S", 0.0)  # what is left is the drain timeout

    async def stopped(router_s: float, worker_s: float) -> tuple[int | None, int | None]:
        workers = {"u": {"role": "unified", "drain_timeout_s": worker_s}}
        config = config_in(tmp_path, router={"drain_timeout_s": router_s}, workers=workers)
        cluster = LocalCluster(config, tmp_path / "logs")
        processes = {}
        for name in ("u", "router"):
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-c", SLOW_TO_STOP, stdout=asyncio.subprocess.PIPE, start_new_session=True
            )
            assert process.stdout is not None
            assert await process.stdout.readline() == b"up\n"
            processes[name] = process
        cluster._processes.update(processes)
        await cluster.stop()
        return processes["router"].returncode, processes["u"].returncode

    assert await stopped(30, 30) == (0, 0)
    assert await stopped(0.05, 30) == (-9, 0)
    assert await stopped(30, 0.05) == (0, -9)
    assert os.listdir(tmp_path) == ["config.json"]


LEAVES_A_SEGMENT = """
import signal
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
memory = SharedMemory(create=True, size=4096)
resource_tracker.unregister(memory._name, "shared_memory")
print(memory.name, flush=True)
signal.pause()
"""


@pytest.mark.slow
async def test_shared_memory_of_a_killed_worker_goes_while_the_cluster_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(supervisor, "_RESTART_S", 0.1)
    paths: list[Path] = []

    cluster = LocalCluster(config_in(tmp_path), tmp_path / "logs")

    async def launch(name: str) -> None:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", LEAVES_A_SEGMENT, stdout=asyncio.subprocess.PIPE, start_new_session=True
        )
        assert process.stdout is not None
        paths.append(Path("/dev/shm") / (await process.stdout.readline()).decode().strip())
        cluster._processes[name] = process

    monkeypatch.setattr(cluster, "_launch", launch)
    await launch("u")
    keeper = asyncio.create_task(cluster._keep("u"))
    cluster._processes["u"].kill()
    for _ in range(1500):
        if len(paths) == 2 and not paths[0].exists():
            break
        await asyncio.sleep(0.02)
    assert not paths[0].exists()
    await asyncio.sleep(0.3)
    assert paths[1].exists()
    keeper.cancel()
    await cluster.stop()
    assert not paths[1].exists()


def test_workers_that_share_a_hosts_memory_must_fit_in_it_together(tmp_path: Path):
    total = shutil.disk_usage("/dev/shm").total
    config = config_in(
        tmp_path, workers={"u": {"role": "unified", "replicas": 3}}, residency={"host_bytes": total // 2}
    )
    with pytest.raises(StartError, match=rf"3 x .*\(u-0, u-1, u-2\), and /dev/shm has .*at most {total // 3}, or"):
        asyncio.run(started(config, tmp_path / "logs"))
    assert not (tmp_path / "logs").exists()


@pytest.mark.parametrize(
    ("total_gib", "free_gib", "num_workers", "expected_gib"),
    [(1024, 1500, 2, 187.5), (512, 1500, 2, 128), (24, 20, 1, 8), (24, 20, 2, 8), (24, 20, 4, 6), (512, None, 2, 8)],
)
def test_the_default_follows_the_memory_of_the_host(monkeypatch, total_gib, free_gib, num_workers, expected_gib):
    gib = 1024**3
    monkeypatch.setattr(host_memory, "available_bytes", lambda: free_gib and free_gib * gib)
    monkeypatch.setattr(host_memory.shutil, "disk_usage", lambda _path: SimpleNamespace(total=total_gib * gib))
    assert with_fitted_default(ResidencyConfig(), num_workers).host_bytes == expected_gib * gib


def test_a_default_that_does_not_fit_is_lowered_and_stays_a_default(tmp_path: Path):
    config = config_in(tmp_path, workers={"u": {"role": "unified"}})
    check_host_bytes(config)
    total = shutil.disk_usage(tmp_path).total
    many = total // config.residency.host_bytes + 2
    fitted = with_fitted_default(config.residency, many, tmp_path)
    assert (fitted.host_bytes, "host_bytes" in fitted.model_fields_set) == (total // many, False)
    dump_cluster_config(config.model_copy(update={"residency": fitted}), tmp_path / "cluster.yaml")
    read = load_cluster_config(tmp_path / "cluster.yaml")
    assert "host_bytes" not in read.residency.model_fields_set
    given = ResidencyConfig(host_bytes=total)
    assert with_fitted_default(given, many, tmp_path) is given
