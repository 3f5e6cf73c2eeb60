"""Latencies name the traces of requests, as exemplars, to a real Prometheus."""

import asyncio
from pathlib import Path
from typing import Any

from support.observability.otlp_receiver import otlp_receiver, tracing_to
from support.observability.prometheus import running_prometheus
from support.router_stand_ins import MODEL, ClusterStandIn, running_cluster
from support.waiting import wait_until

SAMPLED, UNSAMPLED = "0af7651916cd43dd8448eb211c80319c", "1bf7651916cd43dd8448eb211c80319d"
PARENTS = {SAMPLED: f"00-{SAMPLED}-b7ad6b7169203331-01", UNSAMPLED: f"00-{UNSAMPLED}-b7ad6b7169203331-00"}
HISTOGRAMS = [f"prelude_router_{each}_seconds" for each in ("request_duration", "time_to_first_token")]
HISTOGRAMS += [f"gen_ai_server_{each}_seconds" for each in ("time_to_first_token", "time_per_output_token")]
OPEN_METRICS = "application/openmetrics-text"


async def stream(cluster: ClusterStandIn, trace_id: str) -> None:
    body, headers = {"model": MODEL, "prompt": "Hi", "stream": True}, {"traceparent": PARENTS[trace_id]}
    async with cluster.http.post(f"{cluster.url}/v1/completions", json=body, headers=headers) as response:
        await response.read()
    await cluster.is_idle()


async def kind_of_page(cluster: ClusterStandIn, accept: str) -> str:
    async with cluster.http.get(f"{cluster.admin_url}/metrics", headers={"accept": accept}) as response:
        return response.content_type


async def test_prometheus_has_the_traces_of_latencies(tmp_path: Path) -> None:
    with otlp_receiver() as receiver:
        tracing = tracing_to(receiver)
        async with running_cluster(tracing=tracing) as cluster:
            await stream(cluster, SAMPLED)
            await stream(cluster, UNSAMPLED)  # later, and so it would take the place of the other

            def scrape() -> dict[str, list[dict[str, Any]]]:
                target = {"prelude-router": [cluster.admin_url.partition("//")[2]]}
                with running_prometheus(tmp_path, target) as prometheus:
                    wait_until(lambda: all(prometheus.exemplars(f"{name}_bucket") for name in HISTOGRAMS))
                    return {name: prometheus.exemplars(f"{name}_bucket") for name in HISTOGRAMS}

            found = await asyncio.to_thread(scrape)
            for name, given in found.items():
                assert {each["labels"]["trace_id"] for each in given} == {SAMPLED}, name
            (whole,) = found["prelude_router_request_duration_seconds"]
            assert whole["series"]["endpoint"] == "completions"
            assert 0 < float(whole["value"]) <= float(whole["series"]["le"])
            assert await kind_of_page(cluster, "text/plain") == "text/plain"
            assert await kind_of_page(cluster, f"{OPEN_METRICS};version=1.0.0,text/plain;q=0.1") == OPEN_METRICS
        tracing.stop()


async def test_without_tracing_nobody_gets_another_format() -> None:
    async with running_cluster() as cluster:
        await stream(cluster, SAMPLED)
        assert await kind_of_page(cluster, OPEN_METRICS) == "text/plain"
