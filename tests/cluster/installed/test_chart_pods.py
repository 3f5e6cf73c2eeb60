"""The pods of the chart's CPU demo as processes of this machine: their commands, cluster.yaml, ports, and `helm test`.

Each pod has an address of loopback, and a DNS server has the records of the headless services.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.chart.helm_chart import CHART, ROOT, Object, named, needs_helm, render
from support.chart.pods_on_loopback import ADDRESSES, PORTS, components, values_for, wait_until_ready
from support.clusters.dns_server import dns_server

from cluster.local.demo import make_demo

pytestmark = [needs_helm, pytest.mark.long]
DRAIN_S = 150.0
KV = range(32768, 65536)  # ports.kv of helm/values.yaml


async def _run(folder: Path, role_changes: str | bool) -> None:
    async with dns_server() as dns:
        objects = await asyncio.to_thread(render, values_for(dns, role_changes))
        await asyncio.to_thread(make_demo, folder / "models" / "demo")
        processes = {}
        try:
            for component, spec in components(objects):
                processes[component] = start(component, spec, objects, folder)
            await asyncio.to_thread(wait_until_ready)
            for component, process in processes.items():
                found = {port for port in listening(process.pid, ADDRESSES[component]) if port not in KV}
                opened = set(PORTS[component].values())  # by the network policies
                if component == "decode" and not role_changes:
                    opened.remove(PORTS[component]["bootstrap"])
                assert opened <= found, component
                # An engine's ranks meet at a port of their own, of a random number, which no policy opens.
                assert len(found - opened) == (component != "router"), component
            for turn in range(2 if role_changes else 1):
                if turn:
                    await asyncio.to_thread(exchange_roles, folder / "router")
                tested = await asyncio.to_thread(request_an_adapter)
                assert tested.returncode == 0, tested.stderr
                assert tested.stdout.startswith("a0 sha256:")
            for process in processes.values():
                process.send_signal(signal.SIGTERM)
            codes = [await asyncio.to_thread(each.wait, DRAIN_S) for each in processes.values()]
            assert codes == [0, 0, 0]
        finally:
            for process in processes.values():
                if process.poll() is None:
                    process.kill()
                    process.wait()


@pytest.mark.timeout(900)
@pytest.mark.parametrize("role_changes", [False, "manual"])
def test_pods_serve_an_adapter(tmp_path: Path, role_changes: str | bool):
    asyncio.run(_run(tmp_path, role_changes))


def exchange_roles(router: Path) -> None:
    """As an operator does in the toolbox, whose cluster.yaml is the routers': each pod gets the other pool's role."""
    command = [sys.executable, "-m", "cli.main", "workers"]
    place = ["--config", str(router / "cluster.yaml")]
    pods = {"r-prelude-prefill-main-0": "decode", "r-prelude-decode-main-0": "prefill"}
    changes = [  # at once: neither is ready without the other
        subprocess.Popen([*command, "set-role", role, pod, "--even-last", *place], cwd=ROOT)
        for pod, role in pods.items()
    ]
    assert [change.wait(DRAIN_S) for change in changes] == [0, 0]
    listed = subprocess.run([*command, "list", "--json", *place], cwd=ROOT, capture_output=True, check=True)
    workers = json.loads(listed.stdout)["workers"]
    assert {name: (each["role"], each["state"]) for name, each in workers.items()} == {
        name: (role, "ready") for name, role in pods.items()
    }


def start(component: str, spec: dict[str, Any], objects: list[Object], folder: Path) -> subprocess.Popen[bytes]:
    """The container's process, with folders of the test in the place of its volumes."""
    (volume,) = [each for each in spec["volumes"] if each["name"] == "config"]
    text = named(objects, "ConfigMap", volume["configMap"]["name"])["data"]["cluster.yaml"]
    for mount in ("/models", "/var/lib/prelude", "/var/cache/prelude"):
        (folder / mount.strip("/")).mkdir(parents=True, exist_ok=True)
        text = text.replace(mount, str(folder / mount.strip("/")))
    own = folder / component
    own.mkdir()
    (own / "cluster.yaml").write_text(text.replace("0.0.0.0", ADDRESSES[component]))
    variables = {
        "$(POD_NAME)": f"r-prelude-{component}-main-0",
        "$(POD_IP)": ADDRESSES[component],
        "/etc/prelude": str(own),
    }
    (container,) = spec["containers"]
    args = list(container["args"])
    for name, value in variables.items():
        args = [each.replace(name, value) for each in args]
    command, environment = [sys.executable, "-m", "cli.main", *args], {**os.environ, "PRELUDE_DIE_WITH_PARENT": "1"}
    with (own / "log").open("wb") as log:
        return subprocess.Popen(command, env=environment, cwd=ROOT, stdout=log, stderr=log)


def listening(pid: int, address: str) -> set[int]:
    """TCP ports at which a process and those below it listen, at its pod's address or at every one."""
    top = psutil.Process(pid)
    return {
        found.laddr.port
        for process in (top, *top.children(recursive=True))
        for found in process.net_connections("tcp")
        if found.status == psutil.CONN_LISTEN and found.laddr.ip.removeprefix("::ffff:") in (address, "0.0.0.0", "::")
    }


def request_an_adapter() -> subprocess.CompletedProcess[str]:
    """What `helm test` runs."""
    router = f"http://{ADDRESSES['router']}:{PORTS['router']['http']}"
    variables = {"URL": router, "MODEL": "demo", "ADAPTER": "a0", "TIMEOUT_S": "120"}
    script = CHART / "files" / "adapter_request.py"
    return subprocess.run(
        [sys.executable, script], env={**os.environ, **variables}, capture_output=True, text=True, check=False
    )
