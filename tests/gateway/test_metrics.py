"""/metrics of a gateway over real sockets: outcomes, invented names, and several processes that add up."""

import ast
import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from router.gateway.metrics import FOLDER_VARIABLE
from sglang_fair.metrics.table import OUTCOMES, of
from tests.gateway.clusters import COMPLETION, GENERATE, Cluster
from tests.support.waiting import eventually


def samples(page: str) -> dict[tuple[str, ...], float]:
    """By name and the values of the labels, in the order of the labels' names. No row may stand there twice."""
    found: dict[tuple[str, ...], float] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            key = (sample.name.removeprefix("sglang_fair_"), *sample.labels.values())
            assert key not in found
            found[key] = sample.value
    return found


async def metrics(c: Cluster) -> dict[tuple[str, ...], float]:
    async with c.http.get(f"{c.url}/metrics") as response:
        assert response.status == 200
        assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
        return samples(await response.text())


def outcomes(found: dict[tuple[str, ...], float], client: str) -> dict[str, float]:
    return {
        one: found[("requests_total", client, one)]
        for one in OUTCOMES
        if ("requests_total", client, one) in found
    }


def as_(client: str, **more: Any) -> dict[str, Any]:
    return {"headers": {"x-fair-client": client}, **more}


async def test_how_requests_end(c: Cluster) -> None:
    async def counted(outcome: str, count: int) -> None:
        async def done() -> bool:
            return outcomes(await metrics(c), "a").get(outcome) == count

        await eventually(done, f"{count} {outcome}")

    await c.post("/generate", GENERATE, **as_("a"))
    await c.post("/v1/completions", COMPLETION | {"stream": True}, **as_("a"))
    await counted("ok", 2)
    await c.post("/v1/completions", COMPLETION | {"model": "none"}, **as_("a"))
    await counted("refused", 1)
    c.replicas[0].mode = "die midway"
    await c.post("/v1/completions", COMPLETION | {"stream": True, "logprobs": 1}, **as_("a"))
    await counted("failed", 1)
    c.replicas[0].mode = "endless"
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await c.post("/v1/completions", COMPLETION | {"stream": True}, **as_("a"))
    await counted("left", 1)
    found = await metrics(c)
    assert sum(outcomes(found, "a").values()) == 5
    assert found[("request_seconds_count", "a")] == 2
    assert found[("ttft_seconds_count", "a")] == 3, "each stream that had begun"
    assert found[("request_seconds_bucket", "a", "+Inf")] == 2
    assert found[("gateway_router_up",)] == found[("gateway_tenants_ok",)] == 1
    assert found[("refusals_total", "404")] == 1
    ends = ("_bucket", "_count", "_sum", "")
    names = {metric.name + end for metric in of("gateway") for end in ends}
    assert {name for name, *_ in found} <= names


@pytest.mark.slow
def test_processes_add_up_and_a_dead_one_has_no_gauges(tmp_path: Path) -> None:
    """Three processes with one folder, as those of `--workers 3`: sums of counts, of gauges of those that live."""
    code = """
import asyncio, os, sys
from router.gateway.metrics import GatewayMetrics
from router.gateway.record import Exchange
gauges = {"gateway_requests_in_flight": 7, "gateway_router_up": float(sys.argv[1]),
          "gateway_certificate_end_timestamp_seconds": float("inf")}
metrics = GatewayMetrics(5, lambda: gauges, shared=True)
for at in range(3):
    metrics.ended(Exchange("x", "chat", 0.0, 0.0, "a", input_tokens=10, outcome="ok", ended_s=0.5, is_entered=True))
for at in range(2):
    metrics.count("retries_total")
metrics.count("refusals_total", "429")
async def main():
    page = (await metrics.page()).decode()
    print(metrics.status(), flush=True)
    print(page.replace("\\n", "|"), flush=True)
    sys.stdin.readline()
asyncio.run(main())
"""
    environment = {**os.environ, FOLDER_VARIABLE: str(tmp_path)}

    def start(up: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", code, up], env=environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    def page(process: subprocess.Popen[str]) -> dict[tuple[str, ...], float]:
        assert process.stdout is not None
        status.update(ast.literal_eval(process.stdout.readline()))
        return samples(process.stdout.readline().replace("|", "\n"))

    status: dict[str, Any] = {}
    first, second = start("1"), None
    try:
        page(first)
        second = start("0")
        found = page(second)
        assert found["requests_total", "a", "ok"] == 6
        assert found["request_seconds_count", "a"] == 6
        assert (found["retries_total",], found["refusals_total", "429"]) == (4, 2)
        assert (found["gateway_requests_in_flight",], found["gateway_router_up",]) == (14, 0)
        assert (status["requests"], status["in_flight"], status["retried"]) == (20, 14, 4)
        assert (status["refusals"], status["failed"]) == ({"429": 2}, 0)
    finally:
        for process in (first, second):
            if process is not None:
                process.kill()
                process.communicate()
    third = start("1")
    found = page(third)
    third.communicate("\n")
    assert found["requests_total", "a", "ok"] == 9, "what the dead have counted stays"
    assert (found["gateway_requests_in_flight",], found["gateway_router_up",]) == (7, 1)
