"""The images, built by buildah and run by podman, on a stand-in for their base that is made of Debian's packages."""

import asyncio
import json
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from support.chart.helm_chart import needs_helm, pods, render
from support.chart.pods_on_loopback import ADDRESSES, components, values_for, wait_until_ready
from support.clusters.dns_server import dns_server
from support.images.container_store import ROOT, ContainerStore, needs_containers
from support.images.podman_pods import podman_pod
from support.requirements import required_by
from support.waiting import wait_until

from cluster.local.demo import make_demo
from engine.pin import SGLANG_VERSION

pytestmark = [needs_containers, pytest.mark.long]
ROUTER, CPU, WORKER = (ROOT / "images" / f"{each}.Dockerfile" for each in ("router", "cpu", "worker"))
MB = 10**6
CONFIG = """
model: {path: /models/demo/model, name: demo, dtype: float32}
catalog: {url: "sqlite:////var/lib/prelude/catalog.db"}
store: {url: "file:///var/lib/prelude/store"}
discovery: {prefill: {control_port: 9000, dns: prefill.invalid}, decode: {control_port: 9010, dns: decode.invalid}}
router: {host: 127.0.0.13, insecure: true, admin: {host: 127.0.0.13, port: 18802}}
"""
CONFINED = ("--read-only", "--cap-drop=all", "--security-opt=no-new-privileges", "--network=host", "--pull=never")
# What a store asks: the images lack Amazon's other services.
S3_CLIENTS = """
import botocore.session
session = botocore.session.get_session()
for name in ("s3", "sts", "sso", "sso-oidc"):
    session.create_client(name, region_name="eu-central-1")
"""


def base_of(dockerfile: Path) -> str:
    (name,) = re.findall(r"^ARG (?:PYTHON|SGLANG)_IMAGE=(.*)$", dockerfile.read_text(), re.MULTILINE)
    return name


@pytest.fixture(scope="module")
def store() -> Iterator[ContainerStore]:
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="prelude-images-") as folder:
        found = ContainerStore(Path(folder))
        try:
            found.make_base(f"docker.io/library/{base_of(ROUTER)}")
            yield found
        finally:
            found.close()


def added(store: ContainerStore, image: str) -> int:
    """What an image has beside its base, in bytes."""
    return store.size(image) - store.size(base_of(ROUTER))


def test_a_router_runs_confined(store: ContainerStore, tmp_path: Path):
    image = "prelude-router:0.1.0"
    store.build(ROUTER, image)
    assert added(store, image) < 185 * MB
    make_demo(tmp_path / "models" / "demo")
    (tmp_path / "cluster.yaml").write_text(CONFIG)
    tmp_path.chmod(0o755)
    files = {"models": "/models", "cluster.yaml": "/etc/prelude/cluster.yaml"}
    mounts = [f"--volume={tmp_path}/{source}:{target}:ro" for source, target in files.items()]
    folders = ("--tmpfs=/tmp", "--tmpfs=/var/lib/prelude:mode=1777")
    variable = "--env=PRELUDE_HEALTH_URL=http://127.0.0.13:18802/health"
    router = store.run("podman", "run", "--detach", *CONFINED, *mounts, *folders, variable, image)
    wait_until(lambda: store.succeeds("podman", "healthcheck", "run", router), 60)
    status = store.run("podman", "exec", router, "cat", "/proc/1/status")
    assert re.findall(r"^(Uid|Gid|CapPrm|CapEff|CapBnd):\s(\w+)", status, re.MULTILINE) == [
        *(("Uid", "10001"), ("Gid", "10001")),
        *((each, "0" * 16) for each in ("CapPrm", "CapEff", "CapBnd")),
    ]
    assert not store.succeeds("podman", "exec", router, "touch", "/etc/prelude/written")
    assert store.run("podman", "exec", router, "cat", "/etc/pip.conf", "/etc/apt/apt.conf") == ""
    store.run("podman", "exec", router, "python", "-c", S3_CLIENTS)
    store.run("podman", "stop", "--time=30", router)
    assert store.run("podman", "wait", router) == "0", store.run("podman", "logs", router)


def test_a_worker_needs_nothing_but_sglang_beside_its_requirements(store: ContainerStore, tmp_path: Path):
    """On a base with numpy and packaging, which SGLang's image has too. It also has what SGLang requires."""
    (tmp_path / "Dockerfile").write_text(
        f"FROM {base_of(ROUTER)}\nRUN python3 -m pip install --break-system-packages numpy packaging\n"
    )
    store.build(tmp_path / "Dockerfile", f"docker.io/{base_of(WORKER)}")
    with pytest.raises(AssertionError) as failed:
        store.build(WORKER, "prelude-worker:0.1.0")
    lacking = re.findall(r"^([\w-]+)(\S*?)(?:; .*)?: (not|\S+ is) installed$", str(failed.value), re.MULTILINE)
    assert ("sglang", f"=={SGLANG_VERSION}", "not") in lacking, failed.value
    of_sglang = {"gguf", "jinja2", "safetensors", "sglang", "torch", "tqdm", "transformers"}
    assert {(name, found) for name, _, found in lacking} == {(name, "not") for name in of_sglang}, failed.value
    assert of_sglang <= required_by("sglang")


@needs_helm
@pytest.mark.alone
@pytest.mark.timeout(3600)
def test_pods_of_the_chart_serve_an_adapter(store: ContainerStore):
    store.build(CPU, "prelude-cpu:0.1.0")
    assert added(store, "prelude-cpu:0.1.0") < 1750 * MB
    asyncio.run(_serve(store))


async def _serve(store: ContainerStore) -> None:
    async with dns_server() as dns:
        await asyncio.to_thread(_serve_in_pods, store, render(values_for(dns)))


def _serve_in_pods(store: ContainerStore, objects: list) -> None:
    def play(component: str, spec: dict) -> str:
        name, address = f"r-prelude-{component}-main-0", ADDRESSES.get(component, "")
        variables = {"metadata.name": name, "status.podIP": address, "0.0.0.0": address}
        variables["//r-prelude:"] = f"//{ADDRESSES['router']}:"  # the service of routers
        file = store.folder / f"{name}.yaml"
        file.write_text(yaml.safe_dump(podman_pod(name, spec, objects, variables, store.folder)))
        store.run("podman", "kube", "play", file, timeout_s=600)  # until its first container has made a model
        return name

    names = [play(component, spec) for component, spec in components(objects)]
    wait_until_ready()
    (test,) = [spec for _, spec, labels in pods(objects) if labels["app.kubernetes.io/component"] == "test"]
    tester = f"{play('test', test)}-request"
    assert store.run("podman", "wait", tester, timeout_s=200) == "0", store.run("podman", "logs", tester)
    assert store.run("podman", "logs", tester).startswith("a0 sha256:")
    store.run("podman", "pod", "stop", "--time=150", *names, timeout_s=500)
    for name in names:
        ran = json.loads(store.run("podman", "inspect", f"{name}-{'router' if 'router' in name else 'worker'}"))[0]
        assert ran["State"]["ExitCode"] == 0, name
