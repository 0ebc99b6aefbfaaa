"""Debian's Prometheus scrapes a cluster with emulated GPUs that one tenant floods.

Every query of every panel and alert has samples, the flood's alert fires and ends, no alert tells of a defect, and no
critical one is left in the end.
"""

import contextlib
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import yaml

from router.gateway.guard import KEY_VARIABLE
from sglang_fair.common.service_keys import replica_key
from sglang_fair.metrics.table import METRICS
from tests.support.asking import Asking
from tests.support.live import Cluster
from tests.support.monitoring import DRAWN, FOLDER, RULES, WATCHED
from tests.support.ports import free_port
from tests.support.waiting import wait_until
from tests.whole.conftest import ENVIRONMENT

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.machine,
    pytest.mark.xdist_group("flooded"),
    pytest.mark.skipif(
        not (shutil.which("prometheus") and shutil.which("promtool")),
        reason="prometheus and promtool are not installed (Debian: apt-get install prometheus)",
    ),
]

MINUTE_S = 2.0
"""So long a minute of the rules takes here."""
WINDOW = f"{5 * MINUTE_S:.0f}s"
LIMIT_S = 120.0
DEFECTS = tuple(
    f"SglangFair{name}" for name in ("BoundExceeded", "BooksDoNotBalance", "RequestsFail", "NoReplica")
)
"""Alerts that are wrong on however busy a machine. The other critical ones are of processes that do not answer within
the two seconds that a minute has here."""
FLOOD, LIGHT = 60, 2
"""Requests at a time."""


class Prometheus:
    """Debian's, with our rules, on what the cluster has to tell."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        def at(url: str) -> str:
            return urlsplit(url).netloc

        for name, key in (("admin", KEY_VARIABLE), ("replica", replica_key.variable)):
            (folder / f"{name}.key").write_text(ENVIRONMENT[key])
        quick = re.sub(r"\b(\d+)m\b", lambda found: f"{int(found[1]) * MINUTE_S:.0f}s",
                       (FOLDER / "alerts.yaml").read_text())  # fmt: skip
        (folder / "alerts.yaml").write_text(quick)
        configuration = yaml.safe_load((FOLDER / "prometheus.yaml").read_text())
        configuration["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        urls = (
            [cluster.addresses["admin"]],
            [cluster.addresses["router_http"]],
            cluster.addresses["replicas"],
        )
        for job, found in zip(configuration["scrape_configs"], urls, strict=True):
            job["static_configs"][0]["targets"] = [at(url) for url in found]
        (folder / "prometheus.yaml").write_text(yaml.safe_dump(configuration))
        self._folder, self._port = folder, free_port()
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "Prometheus":
        with (self._folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                [
                    "prometheus", f"--config.file={self._folder / 'prometheus.yaml'}",
                    f"--storage.tsdb.path={self._folder / 'data'}", f"--web.listen-address=127.0.0.1:{self._port}",
                ],
                stdout=log, stderr=log,
            )  # fmt: skip
        wait_until(self._is_ready, "Prometheus", LIMIT_S)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process is not None
        self._process.terminate()
        self._process.wait()

    def _is_ready(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, (self._folder / "log").read_text()[-3000:]
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"http://127.0.0.1:{self._port}/-/ready").status_code == 200
        return False

    def _get(self, path: str, **parameters: str) -> Any:
        answer = httpx.get(f"http://127.0.0.1:{self._port}/api/v1/{path}", params=parameters, timeout=30)
        assert answer.status_code == 200, answer.text
        return answer.json()["data"]

    def samples(self, query: str) -> list[dict[str, Any]]:
        """What an instant query has."""
        found: list[dict[str, Any]] = self._get("query", query=query)["result"]
        return found

    def firing(self, name: str) -> list[dict[str, str]]:
        """The labels of this alert, for each that fires."""
        return [one["labels"] for one in self._get("alerts")["alerts"]
                if one["state"] == "firing" and one["labels"]["alertname"] == name]  # fmt: skip


def test_what_prometheus_sees_of_a_flood(flooded: Cluster, tmp_path: Path) -> None:
    queries = {query.replace("$__rate_interval", WINDOW).replace("$client", ".*") for query in DRAWN}
    queries |= {query.replace("[5m]", f"[{WINDOW}]") for query in WATCHED}
    assert {rule["alert"] for rule in RULES if rule["labels"]["severity"] == "critical"} > set(DEFECTS)
    queries -= {query for query in queries if "sglang_fair_batch_items" in query}  # nobody has batches here
    left = list(queries)

    def unanswered() -> list[str]:
        """Those that have had no samples yet: of some there are only while somebody waits."""
        left[:] = [query for query in left if not prometheus.samples(query)]
        return left

    def waits_less() -> bool:
        found = prometheus.samples(
            f"sum(rate(sglang_fair_queue_wait_seconds_sum{{client='drop'}}[{WINDOW}])) / "
            f"sum(rate(sglang_fair_queue_wait_seconds_sum{{client='hose'}}[{WINDOW}]))"
        )
        return len(found) == 1 and float(found[0]["value"][1]) < 1

    with Prometheus(flooded, tmp_path) as prometheus:
        with Asking(flooded.url, prompt_tokens=330, output_tokens=40) as asking:
            forged = {"x-tenant-id": "forged"}
            asking.ask("drop", LIGHT, forged)
            asking.ask("hose", FLOOD, forged)
            wrong = {"authorization": "Bearer drop"}
            url = f"{flooded.url}/v1/models/none"
            assert httpx.get(url, headers=wrong, timeout=LIMIT_S).status_code == 404
            try:
                wait_until(lambda: not unanswered(), "samples for every query", LIMIT_S)
            except AssertionError:
                raise AssertionError(f"no samples: {left}") from None
            wait_until(
                lambda: [one["client"] for one in prometheus.firing("SglangFairFlood")] == ["hose"],
                "the flood's alert, and no other", LIMIT_S,
            )  # fmt: skip
            wait_until(waits_less, "the light tenant waits less in all", LIMIT_S)
            asking.ask("hose", 0)
            wait_until(lambda: not prometheus.firing("SglangFairFlood"), "the end of the alert", LIMIT_S)
        for tenant in ("drop", "hose"):
            assert asking.statuses(tenant) == {200}
            count = asking.answered[tenant, 200]
            query = f"sum(sglang_fair_requests_total{{client='{tenant}', outcome='ok'}})"

            def is_counted(query: str = query, count: int = count) -> bool:
                return float(prometheus.samples(query)[0]["value"][1]) == count

            wait_until(is_counted, f"all {count} answers of {tenant}, whichever process gave them", LIMIT_S)
        for metric in METRICS:
            if metric.kind != "gauge":
                fallen = prometheus.samples(f"resets({metric.series}[{LIMIT_S * 4:.0f}s]) > 0")
                assert fallen == [], f"{metric.name} falls"
        defects = prometheus.samples(
            f'count_over_time(ALERTS{{alertname=~"{"|".join(DEFECTS)}"}}[{LIMIT_S * 4:.0f}s])'
        )
        assert defects == []
        wait_until(
            lambda: not prometheus.samples('ALERTS{severity="critical", alertstate="firing"}'),
            "no critical alert any more", LIMIT_S,
        )  # fmt: skip


def test_promtool_finds_nothing_to_complain_of(flooded: Cluster) -> None:
    """In the pages as they are, and in the configuration that is written for users."""
    admin = {"authorization": f"Bearer {ENVIRONMENT[KEY_VARIABLE]}"}
    operator = {"authorization": f"Bearer {ENVIRONMENT[replica_key.variable]}"}
    for url, headers in (
        (flooded.addresses["admin"], admin),
        (flooded.addresses["router_http"], {}),
        (flooded.addresses["replicas"][0], operator),
    ):
        page = httpx.get(f"{url}/metrics", headers=headers, timeout=30)
        assert page.status_code == 200
        done = subprocess.run(["promtool", "check", "metrics"], input=page.content, capture_output=True)
        assert (done.returncode, done.stdout + done.stderr) == (0, b"")
