"""What the chart starts: commands that exist, with a cluster.yaml that the processes take, on ports that they open."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml
from support.chart.helm_chart import (
    CHART,
    FULLNAME,
    NAMESPACE,
    SCENARIOS,
    Object,
    changed,
    config_in,
    merged,
    named,
    needs_helm,
    of_kind,
    pods,
    rendered,
    scenario_values,
    selects,
)
from support.chart.helm_process import Refused

from adapters.files.locked_folder import SHARED_MEMORY
from cli.main import _parser, _with_this_worker
from cluster.config.certificates import cluster_files
from cluster.config.schema import CATALOG_VARIABLE, ClusterConfig
from cluster.config.workers import WorkerConfig
from cluster.integrity import KEY_VARIABLE
from process.certificates.identity import TRAINER, Identity, certified_role

pytestmark = needs_helm
GIB = 1024**3
ROLES = ("prefill", "decode", "unified")
POD_IP = "127.0.0.2"


def container(spec: dict[str, Any]) -> dict[str, Any]:
    (found,) = spec["containers"]
    return found


def config_of(objects: list[Object], spec: dict[str, Any], folder: Path) -> ClusterConfig:
    """As the process reads it: the ConfigMap that is mounted at the path of `--config`."""
    mounts = {each["name"]: each for each in container(spec)["volumeMounts"]}
    assert mounts["config"]["mountPath"] == "/etc/prelude/cluster.yaml"
    (volume,) = [each for each in spec["volumes"] if each["name"] == "config"]
    return config_in(objects, volume["configMap"]["name"], folder)


def holds_adapters(config: ClusterConfig, worker: WorkerConfig) -> bool:
    return config.may_be(worker.role, "prefill", "unified")


def workers_of(
    scenario: str, folder: Path
) -> Iterator[tuple[dict[str, Any], dict[str, str], ClusterConfig, WorkerConfig]]:
    """Pod, labels, configuration and settings of a worker of each pool, by the command line of its container."""
    objects = rendered(scenario)
    for name, spec, labels in pods(objects):
        if labels["app.kubernetes.io/component"] not in ROLES:
            continue
        args = [each.replace("$(POD_NAME)", "pod-0").replace("$(POD_IP)", POD_IP) for each in container(spec)["args"]]
        arguments = _parser().parse_args(args)
        assert arguments.role == labels["app.kubernetes.io/component"], name
        config = _with_this_worker(config_of(objects, spec, folder), arguments)
        yield spec, labels, config, config.workers["pod-0"]


@pytest.mark.parametrize("scenario", SCENARIOS)
class TestWorkers:
    def test_ports_are_those_that_the_process_opens(self, scenario: str, tmp_path: Path):
        for spec, labels, config, worker in workers_of(scenario, tmp_path):
            opened = {"control": worker.control_port, "metrics": worker.metrics_port, "engine": worker.engine_port}
            if config.may_be(worker.role, "prefill"):
                opened["bootstrap"] = worker.bootstrap_port
            else:
                assert worker.bootstrap_port == 0
            declared = {each["name"]: each["containerPort"] for each in container(spec)["ports"]}
            assert declared == opened
            assert 0 not in opened.values()  # chosen at start, where no policy could follow
            assert worker.host == POD_IP
            (service,) = [
                each
                for each in of_kind(rendered(scenario), "Service")
                if selects(each["spec"]["selector"], labels) and each["metadata"]["name"] != FULLNAME
            ]
            assert {each["name"]: each["port"] for each in service["spec"]["ports"]} == opened
            assert all(each["targetPort"] == each["name"] for each in service["spec"]["ports"])

    def test_discovery_asks_for_headless_services_of_whole_roles(self, scenario: str, tmp_path: Path):
        objects = rendered(scenario)
        pools = [(spec, labels) for _, spec, labels in pods(objects) if "prelude.pool" in labels]
        for _, _, config, worker in workers_of(scenario, tmp_path):
            roles = {labels["app.kubernetes.io/component"] for _, labels in pools}
            assert config.discovery.by_role.keys() == roles
            for role, found in config.discovery.by_role.items():
                name = found.dns.removesuffix(f".{NAMESPACE}.svc.cluster.local")
                service = named(objects, "Service", name)
                assert service["spec"]["clusterIP"] == "None"
                # Pairs find each other before they are ready, and are not ready before that.
                assert service["spec"]["publishNotReadyAddresses"]
                for spec, labels in pools:
                    is_of_role = labels["app.kubernetes.io/component"] == role
                    assert selects(service["spec"]["selector"], labels) == is_of_role
                    if is_of_role:
                        ports = {each["name"]: each["containerPort"] for each in container(spec)["ports"]}
                        assert ports["control"] == found.control_port
            assert worker.role in config.discovery.by_role

    def test_shared_memory_holds_the_residency_budget(self, scenario: str, tmp_path: Path):
        for spec, _, config, worker in workers_of(scenario, tmp_path):
            (shared,) = [each["emptyDir"] for each in spec["volumes"] if each["name"] == "shared-memory"]
            assert shared["medium"] == "Memory"
            size = int(shared["sizeLimit"].removesuffix("Mi")) * 1024**2
            budget = config.residency.host_bytes if holds_adapters(config, worker) else 0
            assert budget + GIB <= size <= budget + 16 * GIB
            resources = container(spec)["resources"]
            assert resources["limits"]["memory"] == resources["requests"]["memory"]
            assert int(resources["limits"]["memory"].removesuffix("Mi")) * 1024**2 >= size + GIB
            assert "host_bytes" in config.residency.model_fields_set  # else it would follow the size of /dev/shm

    def test_disk_cache_fits_its_volume(self, scenario: str, tmp_path: Path):
        for (spec, labels, config, worker), (_, workload) in zip(
            workers_of(scenario, tmp_path), workloads(scenario), strict=True
        ):
            mounts = {each["name"]: each["mountPath"] for each in container(spec)["volumeMounts"]}
            if not holds_adapters(config, worker):
                assert "cache" not in mounts
                continue
            assert mounts["cache"] == str(config.residency.disk_directory)
            sizes = [each["emptyDir"]["sizeLimit"] for each in spec["volumes"] if each["name"] == "cache"]
            for claim in workload["spec"].get("volumeClaimTemplates", ()):
                sizes.append(claim["spec"]["resources"]["requests"]["storage"])
            (size,) = sizes
            assert int(size.removesuffix("Gi")) * GIB >= config.residency.disk_bytes, labels

    def test_gpus_time_to_drain_and_probes(self, scenario: str, tmp_path: Path):
        for spec, _, config, _ in workers_of(scenario, tmp_path):
            worker, engine = container(spec), config.engine_of("pod-0")
            wanted = engine.tensor_parallel if engine.device == "cuda" else None
            assert worker["resources"]["limits"].get("nvidia.com/gpu") == wanted
            assert spec["terminationGracePeriodSeconds"] >= config.drain_timeout_of("pod-0") + 15
            for kind, path in (("startup", "/health"), ("liveness", "/health"), ("readiness", "/ready")):
                assert worker[f"{kind}Probe"]["httpGet"] == {"path": path, "port": "metrics"}

    def test_certificates_are_those_that_callers_look_for(self, scenario: str, tmp_path: Path):
        for spec, _labels, config, worker in workers_of(scenario, tmp_path):
            files = cluster_files(config, "pod-0")
            mounts = {each["name"]: each["mountPath"] for each in container(spec)["volumeMounts"]}
            if files is None:
                assert "tls" not in mounts
                continue
            assert {path.parent for path in files} == {Path(mounts["tls"])}
            (volume,) = [each for each in spec["volumes"] if each["name"] == "tls"]
            if "csi" not in volume:
                assert files.certificate.name == "pod-0.crt"
                continue
            attributes = {
                name.removeprefix("csi.cert-manager.io/"): value.replace("${POD_NAME}", "pod-0")
                for name, value in volume["csi"]["volumeAttributes"].items()
            }
            identity = Identity.parse(attributes["uri-sans"])
            assert identity.role == certified_role(worker.role, config.roles_may_change)
            assert identity.name == "pod-0"
            assert attributes["dns-names"] == identity.dns
            assert {"server auth", "client auth"} <= set(attributes["key-usages"].split(","))
            # The names that the driver gives files unless it is told others.
            assert sorted(path.name for path in files) == ["ca.crt", "tls.crt", "tls.key"]

    def test_workers_read_the_store_only(self, scenario: str, tmp_path: Path):
        values = scenario_values(scenario)["store"]
        for spec, _, config, worker in workers_of(scenario, tmp_path):
            found = container(spec)
            secrets = [each["secretRef"]["name"] for each in found.get("envFrom", ())]
            is_given = "readOnlySecret" in values and holds_adapters(config, worker)
            expected = [values["readOnlySecret"]] if is_given else []
            assert secrets == expected
            assert not {each["name"] for each in found["env"]} & {CATALOG_VARIABLE, KEY_VARIABLE}
            for mount in found["volumeMounts"]:
                assert mount["name"] != "store" or mount["readOnly"]


def workloads(scenario: str) -> Iterator[tuple[str, Object]]:
    for each in of_kind(rendered(scenario), "Deployment", "StatefulSet"):
        if "prelude.pool" in each["metadata"]["labels"]:
            yield each["metadata"]["name"], each


@pytest.mark.parametrize("scenario", SCENARIOS)
class TestRouter:
    @pytest.fixture
    def spec(self, scenario: str) -> dict[str, Any]:
        return named(rendered(scenario), "Deployment", f"{FULLNAME}-router")["spec"]["template"]["spec"]

    @pytest.fixture
    def config(self, scenario: str, spec: dict[str, Any], tmp_path: Path) -> ClusterConfig:
        return config_of(rendered(scenario), spec, tmp_path)

    def test_ports_are_those_that_the_process_opens(self, scenario: str, spec: dict[str, Any], config: ClusterConfig):
        assert str(_parser().parse_args(container(spec)["args"]).config) == "/etc/prelude/cluster.yaml"
        router = config.router
        declared = {each["name"]: each["containerPort"] for each in container(spec)["ports"]}
        assert declared == {"http": router.port, "admin": router.admin_port}
        assert router.host == router.admin.host == "0.0.0.0"
        assert router.admin.insecure  # NetworkPolicies say who reaches it, not the router
        service = named(rendered(scenario), "Service", FULLNAME)
        assert [each["targetPort"] for each in service["spec"]["ports"]] == ["http"]  # and the admin pages are not

    def test_memory_only_adapters_have_room(self, scenario: str, spec: dict[str, Any], config: ClusterConfig):
        (volume,) = [
            each["name"] for each in container(spec)["volumeMounts"] if each["mountPath"] == str(SHARED_MEMORY)
        ]
        (shared,) = [each["emptyDir"] for each in spec["volumes"] if each["name"] == volume]
        assert shared["medium"] == "Memory"
        gib = int(shared["sizeLimit"].removesuffix("Gi"))
        values = merged(yaml.safe_load((CHART / "values.yaml").read_text()), scenario_values(scenario))["router"]
        mib = {"512Mi": 512, "1Gi": 1024, "2Gi": 2048}
        for kind in ("requests", "limits"):
            own = mib[values["resources"][kind]["memory"]]
            assert container(spec)["resources"][kind]["memory"] == f"{own + 1024 * gib}Mi"

    def test_it_may_drain(self, scenario: str, spec: dict[str, Any], config: ClusterConfig):
        pause = int(container(spec)["lifecycle"]["preStop"]["exec"]["command"][1])
        assert spec["terminationGracePeriodSeconds"] >= pause + config.router.drain_timeout_s + 10

    def test_the_catalog_is_that_of_the_secret(self, scenario: str, spec: dict[str, Any], config: ClusterConfig):
        variables = {each["name"]: each for each in container(spec)["env"]}
        catalog = scenario_values(scenario)["catalog"]
        if "existingSecret" not in catalog:
            assert config.catalog.url == catalog["url"]
            return
        assert variables[CATALOG_VARIABLE]["valueFrom"]["secretKeyRef"]["name"] == catalog["existingSecret"]
        assert "catalog" not in yaml.safe_load(
            named(rendered(scenario), "ConfigMap", f"{FULLNAME}-router")["data"]["cluster.yaml"]
        )

    def test_migration_reads_what_routers_read(self, scenario: str, spec: dict[str, Any], config: ClusterConfig):
        objects = rendered(scenario)
        jobs = of_kind(objects, "Job")
        assert bool(jobs) == ("existingSecret" in scenario_values(scenario)["catalog"])
        for job in jobs:
            _parser().parse_args(container(job["spec"]["template"]["spec"])["args"])
            own = named(objects, "ConfigMap", job["metadata"]["name"])
            assert own["data"] == named(objects, "ConfigMap", f"{FULLNAME}-router")["data"]
            hooks = [each["metadata"]["annotations"] for each in (own, job)]
            assert [each["helm.sh/hook"] for each in hooks] == ["pre-install,pre-upgrade"] * 2
            weights = [int(each["helm.sh/hook-weight"]) for each in hooks]
            assert weights[0] < weights[1]  # the file is there before the job
            assert [each["helm.sh/hook-delete-policy"] for each in hooks] == ["before-hook-creation,hook-succeeded"] * 2

    def test_no_key_is_made_by_a_router(self, scenario: str, config: ClusterConfig):
        """Each replica would make its own, and workers would trust none of them."""
        assert config.integrity.key_directory is None


class TestTrainer:
    @pytest.fixture
    def objects(self) -> list[Object]:
        return rendered("trainer")

    @pytest.fixture
    def spec(self, objects: list[Object]) -> dict[str, Any]:
        return named(objects, "Deployment", f"{FULLNAME}-trainer")["spec"]["template"]["spec"]

    @pytest.fixture
    def config(self, objects: list[Object], spec: dict[str, Any], tmp_path: Path) -> ClusterConfig:
        return config_of(objects, spec, tmp_path)

    def test_where_it_listens_and_who_it_calls(
        self, objects: list[Object], spec: dict[str, Any], config: ClusterConfig
    ):
        assert config.trainer
        arguments, url = _parser().parse_args(container(spec)["args"]), urlsplit(config.trainer.url)
        assert (arguments.host, arguments.device, arguments.row_tokens) == ("0.0.0.0", "cuda", 2048)
        declared = {each["name"]: each["containerPort"] for each in container(spec)["ports"]}
        assert url.port is not None
        assert declared == {"http": url.port, "metrics": url.port + 1}
        for address, port in ((url, "http"), (urlsplit(arguments.router), "http")):
            name = str(address.hostname).removesuffix(f".{NAMESPACE}.svc.cluster.local")
            (found,) = named(objects, "Service", name)["spec"]["ports"]
            assert (found["port"], found["targetPort"]) == (address.port, port)
        for kind, path in (("startup", "/health"), ("liveness", "/health"), ("readiness", "/ready")):
            assert container(spec)[f"{kind}Probe"]["httpGet"] == {"path": path, "port": "metrics"}

    def test_it_may_call_the_model_by_another_name(self, tmp_path: Path):
        objects = changed("trainer", {"trainer": {"modelName": "Qwen/Qwen3-8B"}})
        spec = named(objects, "Deployment", f"{FULLNAME}-trainer")["spec"]["template"]["spec"]
        trainer = config_of(objects, spec, tmp_path).trainer
        assert trainer
        assert trainer.model_name == "Qwen/Qwen3-8B"

    def test_its_folder_is_a_volume_of_one_pod(
        self, objects: list[Object], spec: dict[str, Any], config: ClusterConfig
    ):
        assert config.trainer
        mounts = {each["mountPath"]: each["name"] for each in container(spec)["volumeMounts"]}
        volume = mounts[str(config.trainer.folder)]
        (claim,) = [each["persistentVolumeClaim"]["claimName"] for each in spec["volumes"] if each["name"] == volume]
        assert named(objects, "PersistentVolumeClaim", claim)["spec"]["accessModes"] == ["ReadWriteOnce"]
        workload = named(objects, "Deployment", f"{FULLNAME}-trainer")["spec"]
        assert (workload["replicas"], workload["strategy"]) == (1, {"type": "Recreate"})
        own = changed("trainer", {"trainer": {"claim": {"existingClaim": "mine"}}})
        assert of_kind(own, "PersistentVolumeClaim") == []
        assert container(spec)["resources"]["limits"]["nvidia.com/gpu"] == 1
        no_gpu = changed("trainer", {"cluster": {"engine": {"device": "cpu"}}})
        (on_cpu,) = [spec for name, spec, _ in pods(no_gpu) if name.endswith("-trainer")]
        assert container(on_cpu)["resources"]["limits"].keys() == {"memory"}
        assert "cpu" in container(on_cpu)["args"]

    def test_those_that_know_each_other_have_one_secret(
        self, objects: list[Object], spec: dict[str, Any], config: ClusterConfig
    ):
        assert config.trainer
        assert config.trainer.key
        for name in ("router", "trainer", "toolbox"):
            pod = named(objects, "Deployment", f"{FULLNAME}-{name}")["spec"]["template"]["spec"]
            (mount,) = [
                each for each in container(pod)["volumeMounts"] if each["mountPath"] == str(config.trainer.key.parent)
            ]
            (volume,) = [each for each in pod["volumes"] if each["name"] == mount["name"]]
            assert volume["secret"]["secretName"] == "prelude-trainer-key"
        worker = named(objects, "ConfigMap", f"{FULLNAME}-unified-main")["data"]["cluster.yaml"]
        assert "trainer" not in yaml.safe_load(worker)

    def test_its_certificate_is_the_trainers(self, spec: dict[str, Any], config: ClusterConfig):
        (volume,) = [each for each in spec["volumes"] if each["name"] == "tls"]
        identity = Identity.parse(volume["csi"]["volumeAttributes"]["csi.cert-manager.io/uri-sans"])
        assert (identity.role, identity.name) == (TRAINER, TRAINER)
        assert cluster_files(config, TRAINER)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"trainer": {"keySecret": ""}}, "trainer.keySecret: name the Secret"),
            ({"integrity": {"signingKeySecret": ""}}, "integrity: workers would refuse what the trainer saves"),
            ({"integrity": {"trustedKeys": None}}, "integrity: workers would refuse what the trainer saves"),
            (
                {"tls": {"mode": "secret", "secrets": {"router": "r", "operator": "o"}}},
                "tls.secrets.trainer: name the Secret",
            ),
        ],
    )
    def test_what_is_missing_is_named(self, change: dict[str, Any], message: str):
        with pytest.raises(Refused, match=message):
            changed("trainer", change)

    def test_workers_may_be_told_to_take_what_nobody_signed(self):
        accepting = {"cluster": {"integrity": {"accept_unverified": True}}, "integrity": {"signingKeySecret": ""}}
        assert changed("trainer", accepting)

    def test_nothing_is_there_unless_it_is_enabled(self):
        for scenario in SCENARIOS:
            found = yaml.safe_dump(rendered(scenario))
            marks = ("component: trainer", "trainer-key", "trainer.key")
            assert [mark in found for mark in marks] == [scenario == "trainer"] * 3


def test_a_change_restarts_those_who_read_it_and_nobody_else():
    def templates(change: dict[str, Any], scenario: str = "h100-node") -> dict[str, Any]:
        objects = of_kind(changed(scenario, change), "Deployment", "StatefulSet")
        return {each["metadata"]["name"].removeprefix(f"{FULLNAME}-"): each["spec"]["template"] for each in objects}

    before, key = (
        templates({}),
        scenario_values("h100-node")["integrity"]["trustedKeys"]["2026"].replace("MCowBQ", "MCowBR"),
    )
    for change, readers in (
        ({"cluster": {"router": {"hosts": ["a"]}}}, {"router", "toolbox"}),
        ({"integrity": {"trustedKeys": {"2026": key}}}, {"prefill-main"}),
    ):
        after = templates(change)
        assert {name for name in before if before[name] != after[name]} == readers
    manual = templates({"cluster": {"role_changes": "manual"}}, "role-changes")  # routers decide no more
    decided = templates({}, "role-changes")
    assert {name for name in manual if manual[name] != decided[name]} == {"router", "toolbox"}


@pytest.mark.parametrize("scenario", [each for each in SCENARIOS if "toolbox" in scenario_values(each)])
def test_the_toolbox_has_shared_memory(scenario: str):
    """In which commands make work folders that no disk may keep; a container without one has 64 MiB."""
    spec = named(rendered(scenario), "Deployment", f"{FULLNAME}-toolbox")["spec"]["template"]["spec"]
    (volume,) = [each["name"] for each in container(spec)["volumeMounts"] if each["mountPath"] == str(SHARED_MEMORY)]
    (shared,) = [each["emptyDir"] for each in spec["volumes"] if each["name"] == volume]
    assert shared == {"medium": "Memory", "sizeLimit": "1Gi"}
    resources = container(spec)["resources"]
    assert (resources["requests"]["memory"], resources["limits"]["memory"]) == ("1536Mi", "5120Mi")


def test_named_pools_have_settings_of_their_own(tmp_path: Path):
    found = {
        labels["prelude.pool"]: (config.engine_of("pod-0"), worker.domain)
        for _, labels, config, worker in workers_of("rdma-2p6d", tmp_path)
        if worker.role == "decode"
    }
    assert {name: domain for name, (_, domain) in found.items()} == {"main": "rail-0", "spill": "rail-1"}
    assert {name: engine.max_running_requests for name, (engine, _) in found.items()} == {"main": 512, "spill": 64}
    assert all(engine.context_length == 32768 for engine, _ in found.values())
