"""Commands of the pages that tests do not run: why, and what is checked of them instead.

Each entry has to match a command, and each other command is run by tests/cluster/installed/test_pages_commands.py.
"""

import re
import shlex
import shutil
import subprocess
import tomllib
from collections.abc import Callable
from dataclasses import dataclass

import yaml
from support.chart.helm_chart import CHART, changed, of_kind, render
from support.documents.pages import ROOT

from cli.main import _parser
from training.executor.losses import LOSSES

SCENARIO = "h100-node"  # whose names the page on Kubernetes has


@dataclass(frozen=True, slots=True)
class NotRun:
    begins: str  # of the command: a regular expression
    why: str
    check: Callable[[list[str]], None]  # of its words


def parses(words: list[str]) -> None:
    """`prelude` would run it."""
    _parser().parse_args(words[words.index("prelude") + 1 :])


def is_target(words: list[str]) -> None:
    subprocess.run(["make", "--dry-run", *words[1:]], cwd=ROOT, check=True, capture_output=True)


def names_files(words: list[str]) -> None:
    """Paths among its words are of this repository."""
    paths = [word for word in words if word.startswith(("tests/", "images/"))]
    assert paths
    assert [path for path in paths if not (ROOT / path).is_file()] == []


def names_extras(words: list[str]) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(words[-1].removeprefix(".[").removesuffix("]").split(",")) <= extras.keys()


def asks_the_demo(words: list[str]) -> None:
    """It goes to the demo's router, and names an adapter of the demo."""
    text = " ".join(words)
    adapter = re.findall(r"--model (?!local-completions)(\S+)|model=([\w-]+)", text)[0]
    assert "=http://127.0.0.1:8000" in text.replace("--base-url ", "=")
    assert (ROOT / "samples" / "demo" / "adapters" / "".join(adapter)).is_dir()


def configures_a_recipe(words: list[str]) -> None:
    """Of the cookbook, with a loss that the trainer computes."""
    recipe, fields = words[2], dict(word.split("=") for word in words[3:])
    assert recipe.startswith("tinker_cookbook.recipes.")
    assert fields.get("loss_fn", "cross_entropy") in LOSSES


def sets_variables(words: list[str]) -> None:
    """Those before `docker compose` are the ones that compose.yaml cannot do without."""
    named = {word.partition("=")[0] for word in words if "=" in word}
    assert named == set(re.findall(r"\$\{(\w+):?\?", (ROOT / "compose.yaml").read_text()))


def listens_for_traces(words: list[str]) -> None:
    assert "4318:4318" in words  # of `tracing.endpoint`, on the same page


def renders(words: list[str]) -> None:
    """The chart is there, and renders with these values."""
    if words[1] in ("install", "upgrade"):
        values = words[words.index("--values") + 1].replace("my-values.yaml", f"helm/ci/{SCENARIO}-values.yaml")
        assert words[3] == "./helm"
        assert render(yaml.safe_load((ROOT / values).read_text()))


def creates_what_the_chart_reads(words: list[str]) -> None:
    """The Secret's name is in the values, its keys in the chart or what its pods run; kubectl takes the command."""
    if "secret" in words:
        values, name = (CHART / "ci" / f"{SCENARIO}-values.yaml").read_text(), words[words.index("generic") + 1]
        assert re.search(rf"\b{name}\b", values), name
    if shutil.which("kubectl"):
        dry = [word.replace("private.pem", "/dev/null") for word in words]
        done = subprocess.run([*dry, "--dry-run=client"], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


def finds_objects(words: list[str]) -> None:
    """Deployments are the chart's, and so are ports; what a toolbox runs, `prelude` would run."""
    deployments = {
        each["metadata"]["name"].removeprefix("r-"): str(each)
        for each in of_kind(changed(SCENARIO, {"toolbox": {"enabled": True}}), "Deployment")
    }
    assert {word.removeprefix("deploy/") for word in words if word.startswith("deploy/")} <= deployments.keys()
    if "port-forward" in words:
        assert f"'containerPort': {words[-1]}" in deployments["prelude-router"]
    inner = words[words.index("--") + 1 :] if "--" in words else []
    if inner[:1] == ["prelude"]:
        parses(inner)


NO_CLUSTER, NO_DOCKER = "there is no Kubernetes cluster", "there is no Docker engine"
NOT_RUN = (
    NotRun(r"make test\b", "these are the tests", is_target),
    NotRun(r"make serve\b", "it starts the cluster that the others use", is_target),
    NotRun(r"\.venv/bin/python -m pytest", "it is run with all tests", names_files),
    NotRun(r"prelude up", "test_up.py runs it; here the demo has its port", parses),
    NotRun(r"prelude (prefill|decode)-worker", "the addresses are of other hosts", parses),
    NotRun(r"prelude catalog restore", "it needs an empty catalog; test_backup_drill.py restores one", parses),
    NotRun(r"prelude init .*--gpus 8", "there are no eight GPUs", parses),
    NotRun(r"prelude bench (matrix|goodput)", "it takes hours, or GPUs; test_benchmarks_on_engines.py", parses),
    NotRun(r"pip install '\.\[", "it downloads, for a minute", names_extras),
    NotRun(r"python -m sglang.bench_serving", "it lacks packages; test_bench_serving.py runs it", asks_the_demo),
    NotRun(r"lm_eval|guidellm", "they were run by hand: other people's large packages", asks_the_demo),
    NotRun(r"python tests/cluster/clients/run\.py", "test_clients.py runs it: installs for minutes", names_files),
    NotRun(r"python -m tinker_cookbook", "it downloads models; test_cookbook.py runs recipes", configures_a_recipe),
    NotRun(r"docker build", NO_DOCKER, names_files),
    NotRun(r"docker run", NO_DOCKER, listens_for_traces),
    NotRun(r".*docker compose up", NO_DOCKER, sets_variables),
    NotRun(r"kubectl (-n \S+ )?create ", NO_CLUSTER, creates_what_the_chart_reads),
    NotRun(r"kubectl .*(exec|logs|port-forward) ", NO_CLUSTER, finds_objects),
    NotRun(r"helm ", NO_CLUSTER, renders),
)


def reasons_of(command: str) -> list[NotRun]:
    """One, if it is not run."""
    return [each for each in NOT_RUN if re.match(each.begins, command)]


def words_of(command: str) -> list[str]:
    return shlex.split(command, comments=True)
