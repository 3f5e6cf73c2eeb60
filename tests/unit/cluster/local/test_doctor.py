"""`prelude doctor`: every probe with another host's /proc, /sys and nvidia-smi, and the whole of it here."""

import json
import resource
import sys
import sysconfig
import threading
import time
from pathlib import Path

import pytest
from support.commands import Prelude

from cluster.config.load import load_cluster_config
from cluster.local.doctor import devices, report, resources, software
from cluster.local.doctor.finding import Finding, Level, Probe, ok, run_probes
from cluster.local.doctor.host import Host
from engine.kv_probe import DONE, transports_in
from process.free_ports import bound_socket, free_port

SMI = """
| NVIDIA-SMI 580.65.06              Driver Version: 580.65.06      CUDA Version: {cuda}     |
"""
LISTED = "0, NVIDIA H200, 143771, 4\n1, NVIDIA H200, 143771, 90000\n"


class FakeHost(Host):
    """Files below a folder, and programs that a test has written."""

    def __init__(
        self, root: Path, answers: dict[str, tuple[int | None, str]] | None = None, **environment: str
    ) -> None:
        super().__init__(root, environment)
        object.__setattr__(self, "_answers", answers or {})

    def run(self, *command: str, timeout_s: float) -> tuple[int | None, str]:
        known = " ".join(command)
        found = [answer for begin, answer in self._answers.items() if known.startswith(begin)]  # type: ignore[attr-defined]
        return found[0] if found else (None, f"{command[0]}: No such file or directory")

    def write(self, name: str, text: str) -> None:
        self.path(name).parent.mkdir(parents=True, exist_ok=True)
        self.path(name).write_text(text)


def smi(cuda: str = "13.0") -> dict[str, tuple[int | None, str]]:
    return {
        "nvidia-smi --query-gpu": (0, LISTED),
        "nvidia-smi": (0, SMI.format(cuda=cuda)),
    }


def levels(found) -> list[tuple[str, str]]:
    return [(str(each.level), each.text) for each in found]


def test_gpus_of_a_host_that_is_ready(tmp_path: Path):
    assert levels(devices.gpus(FakeHost(tmp_path, smi()), needed=True)) == [
        ("ok", "driver 580.65.06, CUDA 13.0"),
        ("ok", "GPU 0: NVIDIA H200, 143771 MiB, 4 MiB in use"),
        ("warning", "GPU 1: NVIDIA H200, 143771 MiB, 90000 MiB in use"),
    ]


@pytest.mark.parametrize(("needed", "level"), [(True, Level.ERROR), (False, Level.WARNING)])
def test_what_a_gpu_host_may_lack(tmp_path: Path, needed: bool, level: Level):
    old = next(devices.gpus(FakeHost(tmp_path, smi("12.4")), needed=needed))
    assert (old.level, old.remedy) == (level, "the GPU build needs CUDA 13: install driver 580 or newer")
    failed = FakeHost(tmp_path, {"nvidia-smi": (9, "\nNVIDIA-SMI has failed because it couldn't communicate\n")})
    assert [(each.level, each.text) for each in devices.gpus(failed, needed=needed)] == [
        (level, "nvidia-smi failed: NVIDIA-SMI has failed because it couldn't communicate")
    ]
    hung = FakeHost(tmp_path, {"nvidia-smi": (None, "nvidia-smi did not end within 20 s")})
    assert [each.level for each in devices.gpus(hung, needed=needed)] == [Level.ERROR]
    none = FakeHost(tmp_path, {"nvidia-smi --query-gpu": (0, "No devices were found"), "nvidia-smi": (0, SMI)})
    assert levels(devices.gpus(none, needed=needed))[-1] == (str(level), "the driver lists no GPU")
    without = FakeHost(tmp_path)
    expected = (Level.ERROR, "no GPU, and cluster.yaml says `device: cuda`")
    found = next(devices.gpus(without, needed=needed))
    assert (found.level, found.text) == (expected if needed else (Level.OK, "no GPU; engines run on the CPU"))
    without.write("/sys/bus/pci/devices/0000:01:00.0/vendor", "0x10de\n")
    without.write("/sys/bus/pci/devices/0000:01:00.0/class", "0x030200\n")
    found = next(devices.gpus(without, needed=needed))
    assert (found.level, found.text) == (level, "there is an NVIDIA GPU, and no nvidia-smi")


def test_compilers(tmp_path: Path):
    host = FakeHost(tmp_path, PATH=str(tmp_path / "bin"))
    assert [each.level for each in devices.compilers(host)] == [Level.ERROR, Level.WARNING]
    host.write(f"{sysconfig.get_path('include')}/Python.h", "")
    for program in ("bin/gcc", "usr/local/cuda/bin/nvcc"):
        host.write(program, "")
        host.path(program).chmod(0o755)
    assert [each.level for each in devices.compilers(host)] == [Level.OK]


def test_rdma(tmp_path: Path):
    host = FakeHost(tmp_path)
    assert [each.level for each in devices.rdma(host, needed=False)] == [Level.OK]
    assert [each.level for each in devices.rdma(host, needed=True)] == [Level.WARNING]
    for device, state in (("mlx5_0", "4: ACTIVE"), ("mlx5_1", "1: DOWN")):
        port = f"/sys/class/infiniband/{device}/ports/1"
        host.write(f"{port}/state", state)
        host.write(f"{port}/rate", "400 Gb/sec (4X NDR)")
        host.write(f"{port}/link_layer", "InfiniBand")
    assert levels(devices.rdma(host, needed=True)) == [
        ("ok", "mlx5_0: InfiniBand, 400 Gb/sec (4X NDR)"),
        ("warning", "mlx5_1: InfiniBand, 400 Gb/sec (4X NDR): no port is active"),
        ("error", "no /dev/infiniband/uverbs*: programs cannot use the RDMA devices"),
    ]
    host.write("/dev/infiniband/uverbs0", "")
    assert [each.level for each in devices.rdma(host, needed=True)] == [Level.OK, Level.WARNING]


def test_limits(monkeypatch: pytest.MonkeyPatch):
    found = {resource.RLIMIT_NOFILE: (1048576, 1048576), resource.RLIMIT_MEMLOCK: (resource.RLIM_INFINITY,) * 2}
    monkeypatch.setattr(resource, "getrlimit", found.__getitem__)
    assert levels(resources.limits(locks_memory=True)) == [
        ("ok", "nofile: 1048576 (hard 1048576)"),
        ("ok", "memlock: unlimited"),
    ]
    found |= {resource.RLIMIT_NOFILE: (4096, 4096), resource.RLIMIT_MEMLOCK: (8388608, 8388608)}
    assert [each.level for each in resources.limits(locks_memory=True)] == [Level.WARNING, Level.WARNING]
    assert [each.level for each in resources.limits(locks_memory=False)] == [Level.WARNING, Level.OK]


def cluster(folder: Path, text: str = ""):
    path = folder / "cluster.yaml"
    path.write_text("model: {path: model, name: demo}\nworkers: {u: {role: unified}}\n" + text)
    return load_cluster_config(path)


def test_shared_memory_against_the_budgets(tmp_path: Path):
    host = FakeHost(tmp_path)
    assert [each.level for each in resources.shared_memory(host, None)] == [Level.ERROR]
    host.write("/dev/shm/there", "")
    (found,) = resources.shared_memory(host, cluster(tmp_path, f"residency: {{host_bytes: {1 << 60}}}\n"))
    assert found.level is Level.ERROR
    assert found.text.startswith("residency.host_bytes is 1073741824.0 GiB for each worker")
    (found,) = resources.shared_memory(host, cluster(tmp_path, "residency: {host_bytes: 1048576}\n"))
    assert found.text.endswith("; adapters may take 1.0 MiB in each of 1 workers")


def test_memory_against_the_budgets(tmp_path: Path):
    host = FakeHost(tmp_path)
    assert [each.level for each in resources.memory(host, None)] == [Level.WARNING]
    host.write("/proc/meminfo", "MemTotal:       16777216 kB\nMemAvailable:    8388608 kB\n")
    fits, exceeds = (cluster(tmp_path, f"residency: {{host_bytes: {each << 30}}}\n") for each in (8, 9))
    for config in (None, cluster(tmp_path), fits):
        assert levels(resources.memory(host, config)) == [("ok", "host memory: 8.0 GiB available of 16.0 GiB")]
    assert levels(resources.memory(host, exceeds)) == [
        ("warning", "host memory: 8.0 GiB available of 16.0 GiB; adapters may take 9.0 GiB of it")
    ]


def test_memory_of_a_container(tmp_path: Path):
    """Which has less than its host: in its own group, or in one above it."""
    host = FakeHost(tmp_path)
    host.write("/proc/meminfo", f"MemTotal: {64 << 20} kB\nMemAvailable: {48 << 20} kB\n")

    def available(groups: str, files: dict[str, str]) -> str:
        host.write("/proc/self/cgroup", groups)
        for name, text in files.items():
            host.write(f"/sys/fs/cgroup/{name}", text)
        (found,) = resources.memory(host, None)
        return found.text.removeprefix("host memory: ").removesuffix(" available of 64.0 GiB")

    assert available("0::/\n", {}) == "48.0 GiB"  # a host's own group has no limit
    assert available("0::/\n", {"memory.max": "max\n", "memory.current": "1\n"}) == "48.0 GiB"
    assert available("0::/\n", {"memory.max": f"{16 << 30}\n", "memory.current": f"{6 << 30}\n"}) == "10.0 GiB"
    dropped = {"memory.stat": f"anon 3\ninactive_file {2 << 30}\n"}  # when memory is short
    assert available("0::/\n", dropped) == "12.0 GiB"
    assert available("0::/pod/worker\n", {"pod/memory.max": f"{4 << 30}", "pod/memory.current": "0"}) == "4.0 GiB"
    old = {"memory/memory.limit_in_bytes": f"{8 << 30}", "memory/memory.usage_in_bytes": f"{9 << 30}"}
    assert available("3:cpu:/\n4:memory:/docker/1\n", old) == "0.0 MiB"


def test_ports(tmp_path: Path):
    with bound_socket() as taken:
        taken.listen()
        port = taken.getsockname()[1]
        (found,) = resources.ports(cluster(tmp_path, f"router: {{port: {port}, admin: {{port: {free_port()}}}}}\n"))
    assert found.level is Level.WARNING
    assert found.text == f"router.port: 127.0.0.1:{port} is not available (Address already in use); choose another"
    (found,) = resources.ports(cluster(tmp_path, f"router: {{port: {port}, admin: {{port: {free_port()}}}}}\n"))
    assert found.level is Level.OK


def test_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert {each.level for each in software.packages(FakeHost(tmp_path), device="cpu")} == {Level.OK}
    found = list(software.packages(FakeHost(tmp_path, SGLANG_PLUGINS="other"), device="cpu"))
    assert [each.text for each in found if each.level is Level.ERROR] == ["SGLANG_PLUGINS=other"]
    monkeypatch.setattr(software, "_version", lambda name: "0.5.17" if name == "sglang" else "")
    assert [each.text for each in software.packages(FakeHost(tmp_path), device="cpu") if each.level is Level.ERROR] == [
        "SGLang 0.5.17; the hooks are verified for 0.5.23",
        "torch is not installed",
        "nixl is not installed",
    ]


def test_packages_of_engines_on_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """In the environment for CPUs, an engine on a GPU would end at each start."""
    versions = {"sglang": "0.5.23", "torch": "2.13.0+cpu", "nixl": "1.5.1"}
    monkeypatch.setattr(software, "_version", lambda name: versions.get(name, ""))
    monkeypatch.setattr(sys, "prefix", str(tmp_path / ".venv"))
    wrong = [each for each in software.packages(FakeHost(tmp_path), device="cuda") if each.level is Level.ERROR]
    assert [each.text for each in wrong] == [
        "torch 2.13.0+cpu has no CUDA, and cluster.yaml says `device: cuda`",
        "torchvision is not installed",
        "sglang-kernel is not installed",
    ]
    assert all("`make setup-gpu`" in each.remedy for each in wrong)
    assert not [each for each in software.packages(FakeHost(tmp_path), device="cpu") if each.level is Level.ERROR]


@pytest.mark.parametrize(("prefix", "target"), [(".venv", "setup"), (".venv-gpu", "setup-gpu"), ("other", "setup")])
def test_the_remedy_is_for_the_environment_that_runs(
    prefix: str, target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sys, "prefix", str(tmp_path / prefix))
    monkeypatch.setattr(software, "_version", lambda name: "")
    hints = {each.remedy for each in software.packages(FakeHost(tmp_path), device="cpu") if each.level is Level.ERROR}
    hints |= {each.remedy for each in software.hooks(FakeHost(tmp_path), device="cuda")}
    hints |= {each.remedy for each in software.transfer(FakeHost(tmp_path), device="cuda")}
    assert hints == {f"install the locked requirements again: `make {target}`"}


def test_hooks_that_do_not_fit(tmp_path: Path):
    def look(answer: tuple[int | None, str]) -> Finding:
        (found,) = software.hooks(FakeHost(tmp_path, {sys.executable: answer}), device="cpu")
        return found

    assert look((0, "noise\nLEDGER [57, []]\n")).text == "all 57 hooks of cpu engines fit this SGLang"
    wrong = look((0, 'LEDGER [57, ["a_hook"]]'))
    assert (wrong.level, wrong.text) == (Level.ERROR, "1 of 57 hooks do not fit this SGLang: a_hook")
    assert look((1, "Traceback\nImportError: no torch")).text.endswith("with SGLang: ImportError: no torch")
    assert look((None, "python did not end within 235 s")).level is Level.ERROR


UCX = "UCX  INFO    sender intra-node cfg#1 rma_am(tcp/lo)  amo_am(tcp/lo)  am(tcp/lo cma/memory)  ka(tcp/lo)\n"
NVLINK = "UCX  INFO  receiver intra-node cfg#2 rma(cuda_ipc/cuda)  am(sysv/memory)\n"


def test_transports(tmp_path: Path):
    assert transports_in(UCX + "self cfg#0 rma(self/memory)\n") == ["cma/memory", "tcp/lo"]

    def look(output: str, device: str = "cpu", **environment: str) -> list[tuple[str, str]]:
        host = FakeHost(tmp_path, {sys.executable: (0, output)}, **environment)
        return levels(software.transfer(host, device=device))

    done = f"{DONE}\n"
    assert look(UCX + done) == [("ok", "UCX moves KV within this host over cma/memory, tcp/lo")]
    assert look(UCX + done, "cuda")[0][0] == "warning"
    assert look(UCX + NVLINK + done, "cuda")[0][0] == "ok"
    assert look(UCX + done, UCX_TLS="tcp")[1] == ("warning", "UCX_TLS=tcp restricts the transports")
    assert look("no such module") == [("error", "NIXL cannot move KV between two processes: no such module")]


def test_a_probe_that_hangs_or_raises_fails_nothing():
    forever = threading.Event()

    def hangs() -> list[Finding]:
        forever.wait(60)
        return []

    def raises() -> list[Finding]:
        raise OSError("no such device")

    begun = time.monotonic()
    found = run_probes([Probe("a", hangs, 0.1), Probe("b", raises), Probe("c", lambda: [ok("fine")])])
    forever.set()
    assert time.monotonic() - begun < 30
    assert [(each.topic, str(each.level), each.text) for each in found] == [
        ("a", "warning", "no answer within 0.1 s"),
        ("b", "warning", "cannot be looked at: OSError: no such device"),
        ("c", "ok", "fine"),
    ]


def test_a_program_that_hangs_is_killed():
    begun = time.monotonic()
    status, output = Host().run(sys.executable, "-c", "import time; time.sleep(60)", timeout_s=0.3)
    assert (status, output) == (None, f"{sys.executable} did not end within 0.3 s")
    assert time.monotonic() - begun < 30


def test_the_command_here(tmp_path: Path, prelude: Prelude, monkeypatch: pytest.MonkeyPatch):
    """On this host, whatever it is: a line for each topic, and an exit status that follows from them."""
    monkeypatch.chdir(tmp_path)
    status, out, _ = prelude("doctor", "--quick", "--json")
    answer = json.loads(out)
    assert {each["topic"] for each in answer["findings"]} >= {"python", "packages", "gpu", "memory", "shm", "limits"}
    assert status == (1 if answer["error"] else 0)
    assert answer["error"] == sum(each["level"] == "error" for each in answer["findings"])
    assert all(each["remedy"] for each in answer["findings"] if each["level"] != "ok")
    (tmp_path / "cluster.yaml").write_text("model: 3\n")
    out = prelude.prints("doctor", "--quick", status=1)
    assert out.startswith("error   config    ")
    assert "-> correct the file" in out
    assert prelude("doctor", "--quick", "--config", tmp_path / "absent.yaml")[0] == 1


def test_nothing_is_imported_where_it_would_only_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(software, "_version", lambda name: "")
    found = report.examine(None, quick=False, host=FakeHost(tmp_path))
    assert {each.topic for each in found}.isdisjoint({"kv", "hooks"})


@pytest.mark.slow
def test_two_nixl_agents_here():
    """Really: two processes, and what UCX finds on this host."""
    found = list(software.transfer(Host(), device="cpu"))
    assert [each.level for each in found if "UCX_TLS" not in each.text] == [Level.OK], found
