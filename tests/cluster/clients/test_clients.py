"""The clients of docs/clients.md, unmodified, and a pair with the demo's model: agents need answers that end.

What they need is installed below .prelude/, once.
"""

import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.clusters.pretrained_model import needs_pretrained
from support.clusters.running_cluster import RunningCluster, running_cluster

RUN = Path(__file__).with_name("run.py")
INSTALLED = RUN.parents[3] / ".prelude" / "clients"
CLIENTS = runpy.run_path(str(RUN))
pytestmark = [pytest.mark.long, pytest.mark.timeout(1800), needs_pretrained]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    folder = tmp_path_factory.mktemp("demo") / "demo"
    subprocess.run([sys.executable, "-m", "cli.main", "demo", str(folder)], check=True)
    adapters, root = {"pirate": folder / "adapters" / "pirate"}, tmp_path_factory.mktemp("served")
    # The model's own context: agents have long prompts.
    engine = {"device": "cpu", "max_total_tokens": 32768, "max_running_requests": 32, "chunked_prefill_tokens": 256}
    with running_cluster(root, folder / "model", adapters, engine=engine) as cluster:
        yield cluster


@pytest.mark.parametrize("client", [*CLIENTS["PYTHON"], *CLIENTS["NODE"]])
def test_client(served: RunningCluster, client: str):
    done = subprocess.run(
        [sys.executable, RUN, served.url, client, "--adapter", "pirate", "--folder", INSTALLED],
        capture_output=True,
        text=True,
    )
    if done.returncode == CLIENTS["CANNOT_BE_INSTALLED"]:
        pytest.skip(done.stderr[-500:])
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
