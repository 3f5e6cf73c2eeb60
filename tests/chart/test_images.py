"""The images' files and compose.yaml, as far as that goes without a Docker engine: nothing here builds an image."""

import importlib.util
import json
import re
import subprocess
import sys
import tomllib
from importlib.metadata import distribution
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from jsonschema.validators import validator_for
from packaging.utils import canonicalize_name
from support.requirements import complaint_of_imports, needed_by, required_by

from cli.main import _parser
from cluster.config.load import load_cluster_config
from cluster.config.workers import ENGINE_METRICS_PATH
from engine.pin import SGLANG_VERSION

ROOT = Path(__file__).parents[2]
DOCKERFILES = sorted((ROOT / "images").glob("*.Dockerfile"))
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())
LABELS = ("title", "description", "version", "revision", "licenses")


def lock(name: str) -> dict[str, str]:
    """Releases of a file of `requirements`, by name."""
    text = (ROOT / "requirements" / f"{name}.txt").read_text()
    return {canonicalize_name(name): release for name, release in re.findall(r"^([\w.-]+)==(\S+)", text, re.MULTILINE)}


class TestLocks:
    def test_router_is_what_pyproject_asks_for(self):
        """Without an engine; to be made again when pyproject.toml or requirements/cpu.txt change."""
        needed = needed_by("router", "s3", "tracing") | {"packaging"}  # images/check_environment.py
        missing, spare = sorted(needed - lock("router").keys()), sorted(lock("router").keys() - needed)
        assert not missing, f"copy the lines of {missing} from requirements/cpu.txt to router.txt and worker.txt"
        assert not spare, f"remove {spare} from requirements/router.txt and worker.txt"
        assert not needed & {"torch", "sglang", "transformers", "nixl", "triton"}

    def test_releases_are_those_of_the_tested_locks(self):
        for name in ("router", "worker"):
            assert lock(name).items() <= lock("cpu").items()
            assert lock(name).items() <= lock("gpu").items()
        assert lock("worker").keys() == (lock("router").keys() - {"numpy", "packaging"}) | {
            *("accelerate", "fastapi", "annotated-doc", "nixl", "nixl-cu13", "xgrammar", "zstandard")
        }

    def test_a_worker_lacks_nothing_that_sglang_does_not_ask_for(self):
        extras = re.search(r"check_environment\.py (.*) \\", (ROOT / "images" / "worker.Dockerfile").read_text())
        assert extras
        missing = needed_by(*extras[1].split()) - lock("worker").keys() - required_by("sglang")
        assert not missing, f"copy the lines of {sorted(missing)} from requirements/gpu.txt to worker.txt"

    def test_a_router_imports_nothing_else(self):
        imports = f"import {', '.join(check_environment().ROUTER)}\ncli.main._parser()"
        image, absent = lock("router").keys(), ("torch", "sglang")
        assert complaint_of_imports(imports, image, absent) == ""
        assert "lacks ['aiohttp']" in complaint_of_imports(imports, image - {"aiohttp"}, absent)


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.stem)
class TestDockerfiles:
    def test_hadolint_finds_nothing(self, path: Path):
        program = Path(sys.executable).with_name("hadolint")
        if not program.exists():
            pytest.skip("hadolint is not installed, so the Dockerfiles are NOT LINTED: `make setup-dev` installs it")
        required = [f"--require-label=org.opencontainers.image.{label}:text" for label in LABELS]
        done = subprocess.run(
            [program, "--strict-labels", *required, path], capture_output=True, text=True, check=False
        )
        unknown = [line for line in done.stdout.splitlines() if "DL3050" not in line]  # labels beside the required ones
        assert not unknown, done.stdout

    def test_it_ends_as_a_user_with_a_health_check(self, path: Path):
        text = path.read_text()
        last = {match[1]: match[2] for match in re.finditer(r"^([A-Z]+) (.*)$", text, re.MULTILINE)}
        assert last["USER"] == "10001:10001"  # a number, which Kubernetes' runAsNonRoot needs
        assert "healthcheck.py" in last["HEALTHCHECK"]
        assert last["ENTRYPOINT"] == '["tini", "--", "prelude"]'  # engines leave processes, which somebody must reap
        assert yaml.safe_load((ROOT / "helm/values.yaml").read_text())["podSecurityContext"]["runAsUser"] == 10001
        command = yaml.safe_load(last["CMD"])
        if "--help" not in command:
            _parser().parse_args(command)

    def test_bases_are_pinned(self, path: Path):
        (base,) = re.findall(r"^ARG (?:PYTHON|SGLANG)_IMAGE=(.*)$", path.read_text(), re.MULTILINE)
        assert re.fullmatch(r"(python:3\.\d+\.\d+-slim-\w+|lmsysorg/sglang:v" + re.escape(SGLANG_VERSION) + ")", base)
        assert len(set(re.findall(r"^FROM (\S+)", path.read_text(), re.MULTILINE))) == 1

    def test_what_is_installed_is_locked(self, path: Path):
        for line in re.findall(r"pip (?:--python \S+ )?install ((?:.|\\\n)*?)(?: \\\n &&|\n)", path.read_text()):
            words = line.replace("\\\n", " ").split()
            files = [words[number + 1] for number, word in enumerate(words) if word == "-r"]
            assert files or words[-3:] == ["--no-build-isolation", "--editable", "."], line
            assert all((ROOT / each).exists() for each in files)
            assert "--no-deps" in words or files == ["requirements/torch.txt"]
            assert "==" not in line  # it would need a hash, which only files can have

    def test_the_context_has_what_is_copied(self, path: Path):
        allowed = {
            line[1:].split("/")[0] for line in (ROOT / ".dockerignore").read_text().splitlines() if line[:1] == "!"
        }
        for source in re.findall(r"^COPY ([^-].*) \S+$", path.read_text(), re.MULTILINE):
            assert all(each == "." or each.split("/")[0] in allowed for each in source.split())
        found = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]
        packages = {each.rstrip("*") for each in found["include"]}
        assert packages <= allowed, f"let {packages - allowed} into the images, in .dockerignore"


def check_environment() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_environment", ROOT / "images" / "check_environment.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_environments_check_finds_what_is_wrong(monkeypatch: pytest.MonkeyPatch):
    module = check_environment()
    assert module.problems(["router", "s3", "tracing"]) == []
    wanted = ["numpy>=99", "no-such-package", 'torch>=99; extra == "gpu"', 'pyyaml>=6; extra == "router"']
    monkeypatch.setattr(module, "requires", lambda _name: wanted)
    wrong = module.problems(["router"])
    assert [each.partition(":")[0] for each in wrong] == ["numpy>=99", "no-such-package"]


class TestCompose:
    def test_it_is_valid_by_the_compose_specification(self):
        """By the schema that check-jsonschema carries; nothing of that package is imported."""
        path = distribution("check-jsonschema").locate_file("check_jsonschema/builtin_schemas/vendor/compose-spec.json")
        schema = json.loads(Path(str(path)).read_text())
        validator = validator_for(schema)(schema)
        assert [f"{each.json_path}: {each.message}" for each in validator.iter_errors(COMPOSE)] == []

    def test_compiled_kernels_can_be_loaded(self):
        """Triton maps what it has compiled below HOME; Docker mounts a tmpfs without `exec` unless it is told to."""
        service = COMPOSE["services"]["prelude"]
        home = re.search(r" HOME=(\S+)", (ROOT / service["build"]["dockerfile"]).read_text())
        assert home
        options = dict(each.split(":", 1) for each in service["tmpfs"])[home[1]].split(",")
        assert {"exec", "mode=1777"} <= set(options)  # Podman knows no uid=

    def test_each_service_is_pinned_on_loopback_and_without_passwords(self):
        for name, service in COMPOSE["services"].items():
            tag = service["image"].rpartition(":")[2]
            assert re.search(r"\d", tag), name
            for mount in service.get("volumes", ()):
                source = mount.partition(":")[0] if not mount.startswith("$") else ""
                assert not source or source in COMPOSE["volumes"] or (ROOT / source).exists(), source
            assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))
            for variable, value in service.get("environment", {}).items():
                is_secret = re.search("PASSWORD|SECRET|URL", variable) and variable != "PRELUDE_HEALTH_URL"
                assert not is_secret or "${" in value, variable
        assert (ROOT / COMPOSE["services"]["prelude"]["build"]["dockerfile"]).exists()

    def test_the_cluster_is_one_that_starts(self, monkeypatch: pytest.MonkeyPatch):
        service = COMPOSE["services"]["prelude"]
        monkeypatch.setenv("PRELUDE_CATALOG_URL", service["environment"]["PRELUDE_CATALOG_URL"])
        _parser().parse_args(service["command"])
        config = load_cluster_config(ROOT / "images/compose/cluster.yaml")
        assert config.catalog.url == service["environment"]["PRELUDE_CATALOG_URL"]
        holders = [worker for worker in config.workers.values() if worker.holds_adapters]
        needed = len(holders) * config.residency.host_bytes + len(config.workers) * 4 * 1024**3
        assert int(service["shm_size"].removesuffix("gb")) * 1024**3 >= needed
        bucket = config.store.url.removeprefix("s3://").partition("/")[0] if config.store.url else ""
        assert f"store/{bucket}" in COMPOSE["services"]["bucket"]["entrypoint"][2]
        scraped = yaml.safe_load((ROOT / "images/compose/prometheus.yaml").read_text())["scrape_configs"][0]
        targets = [target for each in scraped["static_configs"] for target in each["targets"]]
        ports = [config.router.admin_port, *(worker.metrics_port for worker in config.workers.values())]
        assert targets == [f"127.0.0.1:{port}" for port in ports]
        engines = yaml.safe_load((ROOT / "images/compose/prometheus.yaml").read_text())["scrape_configs"][1]
        assert engines["metrics_path"] == ENGINE_METRICS_PATH
        assert engines["static_configs"] == [{"targets": targets[1:]}]
        published = [port.split(":")[1:] for port in service["ports"]]
        assert published == [[str(config.router.port)] * 2]
        assert config.router.host == "0.0.0.0"
