"""The alerts, run by promtool: each fires in its case, alone, and none on a healthy cluster."""

import re
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml
from support.observability.dashboards import ALERTS, FILES
from support.observability.prometheus import tool

ROOT = Path(__file__).parents[3]
OPERATIONS = ROOT / "docs" / "operations"
pytestmark = pytest.mark.slow
NAMES = [alert["alert"] for alert in ALERTS]
DAY = 1440  # minutes


def worker(name: str, more: str = "") -> str:
    return f'prelude_worker_{name}{{namespace="n",worker="p0",role="prefill"{more}}}'


def router(name: str, labels: str = "") -> str:
    return f'prelude_router_{name}{{namespace="n"{labels}}}'


def trainer(name: str, labels: str = "") -> str:
    return f'prelude_trainer_{name}{{namespace="n"{labels}}}'


def failed(what: str, instance: str) -> str:
    return f'sglang:num_{what}_failed_reqs_total{{namespace="n",job="prelude-engines",instance="{instance}"}}'


def certificate(job: str, name: str, edge: str = "expiry") -> str:
    return f'prelude_certificate_{edge}_timestamp_seconds{{namespace="n",job="prelude-{job}",certificate="{name}"}}'


def up(job: str, instance: str) -> str:
    return f'up{{namespace="n",job="{job}",instance="{instance}"}}'


def answers(status: int) -> str:
    return router("requests_total", f',endpoint="chat",status="{status}"')


# A cluster that is well, by series: five requests per second, 3 of them for adapters that are resident.
HEALTHY = {
    answers(200): "0+300x{n}",
    answers(404): "0+3x{n}",
    answers(499): "0+3x{n}",
    answers(503): "0+0.06x{n}",  # 0.02%
    router("slo_requests_total", ',endpoint="chat",met="true"'): "0+297x{n}",
    router("slo_requests_total", ',endpoint="chat",met="false"'): "0+3x{n}",  # 1%
    router("processes"): "1x{n}",
    router("workers_placeable", ',role="prefill"'): "2x{n}",
    router("workers_placeable", ',role="decode"'): "2x{n}",
    router("workers_placeable", ',role="unified"'): "0x{n}",
    router("workers", ',role="prefill",state="placeable"'): "2x{n}",
    router("workers", ',role="prefill",state="lost"'): "0x{n}",
    router("prefill_queue_seconds"): "0.3x{n}",
    router("decode_load_ratio"): "0.4x{n}",
    router("decode_kv_used_ratio"): "0.6x{n}",
    router("catalog_staleness_seconds"): "0.4x{n}",
    router("audit_events_lost_total"): "0x{n}",
    certificate("router", "clients"): "7776000x{n}",  # 90 days after the test's beginning, 1970
    certificate("router", "clients", "start"): "0x{n}",
    certificate("workers", "cluster"): "870000x{n}",  # one of 30 days just before cert-manager renews it
    certificate("workers", "cluster", "start"): "-1722000x{n}",
    certificate("engines", "cluster"): "86400x{n}",  # one of a day
    certificate("engines", "cluster", "start"): "0x{n}",
    worker("ready"): "1x{n}",
    worker("hung"): "0x{n}",
    worker("draining"): "0x{n}",
    worker("engine_restarts"): "1x{n}",
    worker("adapter_lease_hits_total"): "0+180x{n}",
    worker("adapter_loads_total", ',source="store",result="ok"'): "0+2x{n}",
    worker("adapter_loads_total", ',source="host",result="ok"'): "0+2x{n}",
    worker("adapter_load_waiters"): "1x{n}",
    worker("adapter_evictions_total", ',tier="host"'): "0+1x{n}",
    worker("adapter_evictions_total", ',tier="disk"'): "0+9x{n}",
    'prelude_engine_adapter_step_seconds_sum{namespace="n",instance="e0",step="fill"}': "0+0.6x{n}",
    # Long ago.
    'sglang:num_transfer_failed_reqs_total{namespace="n",job="prelude-engines",instance="e0",engine_type="prefill"}': (
        "2x{n}"
    ),
    trainer("start_time_seconds"): "1x{n}",
    trainer("models", ',state="ready"'): "1x{n}",
    trainer("commands_total", ',kind="step",result="done"'): "0+9x{n}",
    trainer("free_disk_bytes"): "9000000000x{n}",
    up("n/prelude-router", "r0"): "1x{n}",
    up("prelude-engines", "e0"): "1x{n}",
    up("prelude-engines", "e1"): "1x{n}",
    up("prelude-workers", "e1"): "1x{n}",  # an engine's agent has the same address
    up("something-else", "x0"): "0x{n}",  # not ours
}


@dataclass(frozen=True)
class Case:
    """What makes one alert fire: series that differ from the healthy ones, and when to look."""

    series: dict[str, str]
    at: str = "30m"
    also: set[str] = field(default_factory=set)  # alerts that fire, too, for the same reason
    not_at: str = ""  # when it must not fire yet, or no more


_503 = answers(503)
_LATE, _KEPT = (router("slo_requests_total", f',endpoint="chat",met="{met}"') for met in ("false", "true"))
_EXPIRY, _START = (certificate("router", "clients", edge) for edge in ("expiry", "start"))
_OLD = {_START: "-9000000x{n}"}  # 104 days

CASES: dict[str, list[Case]] = {
    "PreludeErrorBudgetBurnsFast": [
        Case(
            {_503: "0+0x60 0+30x{n}"}, "1h30m", {"PreludeErrorBudgetBurnsSlowly"}, "1h"
        ),  # 9% of answers fail from the first hour on
        Case(
            {router("stream_errors_total", ',endpoint="chat",code="worker_lost"'): "0+30x{n}"},
            "1h30m",
            {"PreludeErrorBudgetBurnsSlowly"},
        ),
    ],
    # 0.4% fail: a burn rate of 4, which no page is sent for. Windows that began before the data see the same share.
    "PreludeErrorBudgetBurnsSlowly": [Case({_503: "0+1.2x{n}"}, "1h30m")],
    "PreludeLatencyBudgetBurnsFast": [
        Case({_LATE: "0+240x{n}", _KEPT: "0+60x{n}"}, "1h30m", {"PreludeLatencyBudgetBurnsSlowly"})
    ],
    "PreludeLatencyBudgetBurnsSlowly": [Case({_LATE: "0+60x{n}", _KEPT: "0+240x{n}"}, "1h30m")],  # 20%
    # A target that does not answer has no series any more.
    "PreludeNoRouters": [Case({router("processes"): "1x10 _x{n}"}, "20m", not_at="10m")],
    "PreludeNoWorkers": [
        Case({router("workers_placeable", ',role="prefill"'): "2x10 0x{n}"}, "15m", not_at="9m"),
        Case({router("workers_placeable", ',role="decode"'): "0x{n}"}, "15m"),
    ],
    "PreludeWorkerLost": [Case({router("workers", ',role="prefill",state="lost"'): "1x{n}"}, "6m", not_at="4m")],
    "PreludeTargetDown": [
        Case({up("n/prelude-router", "r0"): "0x{n}"}, "6m", not_at="4m"),
        Case({up("prelude-engines", "10.0.0.7:9001"): "0x{n}"}, "6m", not_at="4m"),
    ],
    "PreludeWorkerNotReady": [
        Case({worker("ready"): "0x{n}"}, "20m", not_at="10m"),
        # While its model is loaded, the engine's page answers 503.
        Case(
            {
                'prelude_worker_ready{namespace="n",instance="10.0.0.7:9001",worker="p1",role="prefill"}': "0x{n}",
                up("prelude-workers", "10.0.0.7:9001"): "1x{n}",
                up("prelude-engines", "10.0.0.7:9001"): "0x{n}",
            },
            "20m",
            not_at="10m",
        ),
    ],
    "PreludeWorkerHung": [Case({worker("hung"): "0x10 1x{n}"}, "13m", not_at="9m")],
    "PreludeWorkerFlaps": [
        Case({worker("engine_restarts"): "0x10 1x5 2x5 3x{n}"}, "25m", not_at="12m"),
        Case({worker("ready"): "1x2 0x2 1x2 0x2 1x2 0x2 1x2 0x2 1x{n}"}, "25m"),
    ],
    "PreludeDecodeIsShort": [Case({router("decode_load_ratio"): "1.5x{n}"}, "15m", not_at="8m")],
    "PreludePrefillQueueIsLong": [Case({router("prefill_queue_seconds"): "8x{n}"}, "15m", not_at="8m")],
    "PreludeKvMemoryIsFull": [Case({router("decode_kv_used_ratio"): "0.99x{n}"}, "15m", not_at="8m")],
    "PreludeColdLoadStorm": [
        Case(
            {
                worker("adapter_loads_total", ',source="store",result="ok"'): "0+120x{n}",
                worker("adapter_load_waiters"): "40x{n}",
            },
            "20m",
            not_at="2m",
        )
    ],
    "PreludeAdapterLoadsFail": [
        Case({worker("adapter_loads_total", ',source="store",result="adapter_corrupt"'): "0+3x{n}"}, "25m")
    ],
    "PreludeResidencyThrash": [
        Case({worker("adapter_evictions_total", ',tier="host"'): "0+90x{n}"}, "30m", not_at="5m")
    ],
    "PreludeSlotThrash": [
        Case({'prelude_engine_adapter_step_seconds_sum{namespace="n",instance="e0",step="fill"}': "0+12x{n}"}, "30m")
    ],
    "PreludeKvTransfersFail": [
        # SGLang's counters begin at the first failure; they stay up, the alert does not.
        Case({failed("bootstrap", "e0"): "_x10 3x{n}"}, "15m", not_at="9m"),
        Case({failed("transfer", "e1"): "_x10 5x{n}"}, "15m", not_at="30m"),
        # After a gap, what has failed since.
        Case(
            {failed("transfer", "e1"): "5x10 stale _x14 5x5 9x{n}", up("prelude-engines", "e1"): "1x10 0x15 1x{n}"},
            "34m",
            not_at="31m",
        ),
    ],
    "PreludeCatalogLags": [
        Case({router("catalog_staleness_seconds"): "0+60x{n}"}, "5m"),
        Case({router("catalog_staleness_seconds"): "1000000000x{n}"}, "5m", not_at="1m"),  # promtool reads no infinity
    ],
    "PreludeCertificateExpires": [
        Case({_EXPIRY: "1000000x{n}"} | _OLD, "2h", not_at="30m"),  # in 11.5 days
        Case({_EXPIRY: "1000000x{n}", _START: "_x{n}"}, "2h"),  # of a process that does not say how old it is
    ],
    "PreludeCertificateExpiresSoon": [Case({_EXPIRY: "100000x{n}"} | _OLD, "40m")],
    "PreludeTrainerMissing": [Case({trainer("start_time_seconds"): "1x10 _x{n}"}, "25m", not_at="9m")],
    "PreludeTrainerStalls": [
        Case({trainer("commands_total", ',kind="step",result="done"'): "0+9x10 90x{n}"}, "40m", not_at="14m")
    ],
    "PreludeTrainerDiskShort": [Case({trainer("free_disk_bytes"): "9000000000x10 1000000x{n}"}, "20m", not_at="9m")],
    "PreludeAuditEventsLost": [Case({router("audit_events_lost_total"): "0x10 0+1x5 5x{n}"}, "18m", not_at="9m")],
}


def minutes(text: str) -> int:
    return sum(int(number) * {"m": 1, "h": 60, "d": DAY}[unit] for number, unit in re.findall(r"(\d+)([mhd])", text))


def promtool_test(series: dict[str, str], expected: dict[str, set[str]]) -> dict[str, object]:
    """One test: the alerts that fire, by when to look."""
    length = max(minutes(at) for at in expected) + 5
    return {
        "interval": "1m",
        "input_series": [
            {"series": name, "values": values.replace("{n}", str(length))} for name, values in series.items()
        ],
        "promql_expr_test": [
            {
                "expr": 'count by (alertname) (ALERTS{alertstate="firing"})',
                "eval_time": at,
                "exp_samples": [{"labels": f'{{alertname="{name}"}}', "value": 1} for name in sorted(names)],
            }
            for at, names in expected.items()
        ],
    }


def run_promtool(folder: Path, tests: list[dict[str, object]]) -> None:
    path = folder / "tests.yaml"
    path.write_text(
        yaml.safe_dump({"rule_files": [str(FILES / "rules.yaml")], "evaluation_interval": "1m", "tests": tests})
    )
    done = subprocess.run([tool("promtool"), "test", "rules", str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_has_a_case() -> None:
    assert set(CASES) == set(NAMES)
    assert len(set(NAMES)) == len(NAMES)


def test_a_healthy_cluster_is_silent(tmp_path: Path) -> None:
    run_promtool(tmp_path, [promtool_test(HEALTHY, {"10m": set(), "1h30m": set()})])


@pytest.mark.parametrize("name", CASES)
def test_an_alert_fires_alone(tmp_path: Path, name: str) -> None:
    tests = []
    for case in CASES[name]:
        expected = {case.at: {name} | case.also}
        if case.not_at:
            expected[case.not_at] = set()
        tests.append(promtool_test(HEALTHY | case.series, expected))
    run_promtool(tmp_path, tests)


def test_a_cluster_that_is_idle_or_new_is_silent(tmp_path: Path) -> None:
    """Nobody asks for anything, most series do not exist yet, and one request of three fails."""
    idle = {name: values for name, values in HEALTHY.items() if "_total" not in name}
    idle[trainer("models", ',state="ready"')] = "0x{n}"
    few = {
        answers(200): "0x10 1x10 2x{n}",
        _503: "0x15 1x{n}",
    }
    run_promtool(tmp_path, [promtool_test(series, {"20m": set(), "70m": set()}) for series in (idle, idle | few)])


def test_old_failures_are_no_new_ones_after_a_gap(tmp_path: Path) -> None:
    """Prometheus is new, was away, or did not reach the engine: there is no sample of ten minutes ago."""
    tests = []
    looks: dict[str, set[str]] = {at: set() for at in ("21m", "26m", "29m", "31m", "40m")}
    for counts, ups in (
        ("_x20 5x{n}", "_x20 1x{n}"),  # new
        ("5x5 _x15 5x{n}", "1x5 _x15 1x{n}"),  # away
        ("5x17 stale _x2 5x{n}", "1x17 0x3 1x{n}"),  # did not reach it, for too short a time for another alert
    ):
        for what in ("transfer", "bootstrap"):
            tests.append(promtool_test(HEALTHY | {failed(what, "e1"): counts, up("prelude-engines", "e1"): ups}, looks))
    run_promtool(tmp_path, tests)


def test_another_release_of_a_namespace_hides_nothing(tmp_path: Path) -> None:
    """One is well, and of the other no worker is left, or half of its answers fail."""

    def other(series: str) -> str:
        return series.replace('namespace="n"', 'namespace="n",release="other"')

    gone = {other(name): "0x{n}" for name in HEALTHY if name.startswith("prelude_router_workers_placeable")}
    no_router = {other(worker("ready")): "1x{n}"}
    fails = {other(answers(each)): "0+3x{n}" for each in (200, 500)}
    burns = {"PreludeErrorBudgetBurnsFast", "PreludeErrorBudgetBurnsSlowly"}
    run_promtool(
        tmp_path,
        [
            promtool_test(HEALTHY | gone, {"10m": {"PreludeNoWorkers"}}),
            promtool_test(HEALTHY | no_router, {"10m": {"PreludeNoRouters"}}),
            promtool_test(HEALTHY | fails, {"1h30m": burns}),
        ],
    )


def test_every_alert_says_of_which_release_it_is() -> None:
    for alert in ALERTS:
        for labels in re.findall(r"(?:by|on) \(([^)]*)\)", alert["expr"]):
            assert {"namespace", "release"} <= set(labels.split(", ")), alert["alert"]


def test_every_alert_links_to_what_to_do_and_is_in_the_list() -> None:
    rows = re.findall(r"^\| \[(\w+)\]\(([^)]+)\) \| (\w+) \| (.*) \|$", (OPERATIONS / "README.md").read_text(), re.M)
    links = []
    for rule in ALERTS:
        name, severity, notes = rule["alert"], rule["labels"]["severity"], rule["annotations"]
        assert severity in ("critical", "warning")
        link = notes["runbook_url"].removeprefix("docs/operations/")
        links.append((name, link, severity, notes["summary"]))
        page, _, anchor = link.partition("#")
        assert anchor == name.lower()
        found = re.search(rf"^## {name}\n(.*?)(?=^## |\Z)", (OPERATIONS / page).read_text(), re.DOTALL | re.MULTILINE)
        assert found, f"{page} has no section {name}"
        assert "**Look at**" in found[1], name
        assert re.search(r"\*\*Do\*\*\n\n1\. ", found[1]), name
    assert rows == links


def test_no_page_is_about_an_alert_that_is_gone() -> None:
    headings = {
        each for page in OPERATIONS.glob("*.md") for each in re.findall(r"^## (Prelude\w+)$", page.read_text(), re.M)
    }
    assert headings == set(NAMES)
