"""Prometheus and promtool, for tests: those on PATH, or what `make prometheus` has put into .venv."""

import contextlib
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from support.logged_process import logged_process
from support.waiting import wait_until

from process.free_ports import free_port

_IN_VENV = Path(__file__).parents[3] / ".venv" / "prometheus" / "usr" / "bin"


def tool(name: str) -> str:
    """Path of `prometheus` or `promtool`. Skips the test without it."""
    found = shutil.which(name) or shutil.which(name, path=str(_IN_VENV))
    if found is None:
        pytest.skip(
            f"NOT TESTED: there is no {name}. `make prometheus` unpacks Debian's package into .venv; elsewhere, "
            "install Prometheus so that it is on PATH"
        )
    return found


class Prometheus:
    """A running server."""

    def __init__(self, url: str) -> None:
        self.url = url

    def is_ready(self) -> bool:
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(f"{self.url}/-/ready", timeout=2).status_code == 200
        return False

    def query_range(self, expression: str, start: float, end: float, step_s: float) -> list[dict[str, Any]]:
        """The series that an expression has between two times. Raises AssertionError with Prometheus' message."""
        parameters: dict[str, Any] = {"query": expression, "start": start, "end": end, "step": step_s}
        answer = httpx.get(f"{self.url}/api/v1/query_range", params=parameters, timeout=120).json()
        assert answer["status"] == "success", f"{expression}: {answer.get('error')}"
        return answer["data"]["result"]

    def exemplars(self, expression: str) -> list[dict[str, Any]]:
        """The exemplars that the series of an expression have had until now, each with its series' labels."""
        parameters: dict[str, Any] = {"query": expression, "start": 0, "end": time.time() + 60}
        answer = httpx.get(f"{self.url}/api/v1/query_exemplars", params=parameters, timeout=120).json()
        assert answer["status"] == "success", answer
        return [{**each, "series": found["seriesLabels"]} for found in answer["data"] for each in found["exemplars"]]

    def targets(self) -> dict[tuple[str, str], str]:
        """The health of what it scrapes, by job and URL."""
        found = httpx.get(f"{self.url}/api/v1/targets", timeout=120).json()["data"]["activeTargets"]
        return {(each["labels"]["job"], each["scrapeUrl"]): each["health"] for each in found}

    def names(self) -> set[str]:
        """The names of all series."""
        return set(httpx.get(f"{self.url}/api/v1/label/__name__/values", timeout=120).json()["data"])


@contextlib.contextmanager
def running_prometheus(
    folder: Path, targets: Mapping[str, Sequence[str]] | str, rules: Path | None = None
) -> Iterator[Prometheus]:
    """A server that scrapes `targets`, addresses by job, each second, for as long as the context lasts.

    Addresses are host:port, or host:port/path with the same path for a whole job. A URL instead of all has them.
    """
    program = tool("prometheus")
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(rules)] if rules else [],
        "scrape_configs": [
            {
                "job_name": job,
                "metrics_path": f"/{addresses[0].partition('/')[2] or 'metrics'}",
                "static_configs": [{"targets": [each.partition("/")[0] for each in addresses]}],
            }
            for job, addresses in targets.items()
        ]
        if not isinstance(targets, str)
        else [{"job_name": "prelude", "http_sd_configs": [{"url": targets, "refresh_interval": "1s"}]}],
    }
    path = folder / "prometheus.yml"
    path.write_text(yaml.safe_dump(config))
    address = f"127.0.0.1:{free_port()}"
    options = [f"--config.file={path}", f"--storage.tsdb.path={folder / 'tsdb'}", "--enable-feature=exemplar-storage"]
    with logged_process([program, *options, f"--web.listen-address={address}"], folder / "prometheus.log"):
        server = Prometheus(f"http://{address}")
        wait_until(server.is_ready)
        yield server
