"""The page in a browser, before an emulated cluster with tenants, one of which floods."""

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
import pytest

from router.gateway.guard import KEY_VARIABLE
from sglang_fair.common.service_keys import replica_key
from sglang_fair.tenants import edit, file, keys
from sglang_fair.tenants.model import Tenant
from tests.support.browser import IN_A_BROWSER, SIZES, Page, chromium
from tests.support.live import EMULATED, Cluster

pytestmark = [*IN_A_BROWSER, pytest.mark.timeout(900)]

ADMIN = "the admin's key"
ENVIRONMENT = {KEY_VARIABLE: ADMIN, replica_key.variable: "the replicas' key"}
FLOOD, LIGHT, RIVAL = 48, 1, 48
"""Requests of each at a time."""
PROMPT_TOKENS, OUTPUT_TOKENS = 600, 60


@pytest.fixture(scope="module")
def tenants(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("tenants") / "tenants.yaml"
    for name in ("flood", "light", "rival"):
        edit.add(path, name, Tenant(keys=[keys.written(keys.digest(name))]))
    return path


class Load:
    """Clients that ask without a pause, in a thread of its own; a request that fails is asked again."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._stop = threading.Event()
        self._at_a_time = {"flood": FLOOD, "light": LIGHT, "rival": 0}
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        self._rival = threading.Event()

    def __enter__(self) -> "Load":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._rival.set()
        self._thread.join()

    def rival(self) -> None:
        """A second one begins to flood."""
        self._rival.set()

    async def _run(self) -> None:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as http, asyncio.TaskGroup() as group:
            for name, count in (("flood", FLOOD), ("light", LIGHT), ("rival", RIVAL)):
                for number in range(count):
                    group.create_task(self._client(http, name, Random(f"{name} {number}")))

    async def _client(self, http: aiohttp.ClientSession, name: str, random: Random) -> None:
        prefix = [random.randrange(3, 30_000) for _ in range(PROMPT_TOKENS // 2)]
        while not self._stop.is_set():
            if name == "rival" and not self._rival.is_set():
                await asyncio.sleep(0.1)
                continue
            tail = [random.randrange(3, 30_000) for _ in range(PROMPT_TOKENS // 2)]
            body = {
                "input_ids": prefix + tail,
                "sampling_params": {"max_new_tokens": OUTPUT_TOKENS, "ignore_eos": True, "temperature": 0},
            }
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                async with http.post(
                    f"{self._url}/generate", json=body, headers={"authorization": f"Bearer {name}"}
                ) as answer:
                    await answer.read()
            if name == "light":
                await asyncio.sleep(0.5)


@pytest.fixture(scope="module")
def cluster(tenants: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    from tests.support.ports import free_port

    arguments = (
        *EMULATED, "--tenants", str(tenants), "--dashboard-port", str(free_port()),
        "--quantum", "4000", "--", "--max-running-requests", "8",
    )  # fmt: skip
    with Cluster(*arguments, environment=ENVIRONMENT) as made:
        yield made


@pytest.fixture(scope="module")
def load(cluster: Cluster) -> Iterator[Load]:
    with Load(cluster.url) as made:
        yield made


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as made:
        yield made


@pytest.fixture
def page(browser: Any, cluster: Cluster, load: Load) -> Iterator[Page]:
    with Page(browser, cluster.addresses["dashboard"], ADMIN) as made:
        yield made
        assert made.trouble == []


def test_the_light_tenant_waits_less_than_the_one_that_floods(page: Page) -> None:
    def waits() -> bool:
        light, flood = page.client("light")["wait"], page.client("flood")["wait"]
        return light is not None and flood is not None and light < flood

    page.until(waits, "the light tenant's wait is below the flooder's")
    rows = page.page.eval_on_selector_all("#clients tbody tr", "rows => rows.map(row => row.dataset.client)")
    assert set(rows) == {"light", "flood"}


def test_a_weight_raised_in_the_page_raises_the_share(page: Page, load: Load, tenants: Path) -> None:
    load.rival()

    def halves() -> bool:
        shares = [page.client(name)["share"] for name in ("flood", "rival")]
        return all(share is not None and 0.38 < share < 0.62 for share in shares)

    page.until(halves, "two that flood have equal shares")

    def measured() -> list[dict[str, str]]:
        """All replicas, if each has answered at this look."""
        rows = page.page.eval_on_selector_all(
            "#replicas tbody tr", "rows => rows.map(row => ({...row.dataset}))"
        )
        return rows if all(row["difference"] and row["bound"] for row in rows) else []

    for said in page.until(measured, "all replicas have said what they served"):
        assert float(said["difference"]) <= float(said["bound"])
    page.page.click("#clients tr[data-client=rival] button")
    page.picture("weight")
    page.page.fill("#weight-value", "3")
    page.page.click("#weight-form button.main")
    page.page.wait_for_selector("#weight", state="hidden")
    assert file.read(tenants).tenants["rival"].weight == 3
    page.until(lambda: page.client("rival")["weight"] == 3, "the replicas have the new weight")

    def three_to_one() -> bool:
        flood, rival = page.client("flood"), page.client("rival")
        if None in (flood["share"], rival["share"], flood["fair"], rival["fair"]):
            return False
        return rival["share"] > 2.2 * flood["share"] and rival["fair"] > 2 * flood["fair"]

    page.until(three_to_one, "the share follows, as is fair")


def test_a_click_on_a_request_shows_why_it_waited(page: Page) -> None:
    page.page.select_option("#of", "flood")
    page.page.wait_for_selector("#requests tbody tr[data-client=flood]")
    page.page.click("#requests tbody tr:has(.badge[data-state=ok]) button")
    page.page.wait_for_selector("#explanation .said")
    page.picture("explained")
    said = page.page.inner_text("#explanation")
    assert "replica: waited" in said
    assert "router: " in said
    assert "its client's counter" in said


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
def test_it_fits_and_everybody_can_read_it(
    browser: Any, cluster: Cluster, load: Load, size: str, scheme: str
) -> None:
    with Page(browser, cluster.addresses["dashboard"], ADMIN, size, scheme) as made:
        made.until(lambda: made.client("flood")["share"], "shares")
        made.page.wait_for_timeout(1000)
        made.picture(f"dashboard-{size}-{scheme}")
        made.picture(f"whole-{size}-{scheme}", whole=True)
        assert made.page.evaluate("document.documentElement.scrollWidth") <= SIZES[size][0]
        assert made.axe() == []
        made.page.click("#clients tr[data-client=flood] button")
        made.page.wait_for_selector("#weight[open]")
        assert made.axe() == []
        assert made.page.evaluate("document.documentElement.scrollWidth") <= SIZES[size][0]
        assert made.trouble == []


def test_a_router_that_is_killed_is_said_and_comes_back(page: Page, cluster: Cluster) -> None:
    page.until(lambda: page.health() == "ok", "all is well")
    router = cluster.addresses["pids"]["router"]
    os.kill(router, signal.SIGSTOP)  # the cluster starts a dead one again at once: this one is slow to die
    try:
        page.until(lambda: page.health() == "router down", "the page says that the router is down")
        assert "router" in page.page.inner_text("#notes").lower()
        page.picture("router-down")
    finally:
        os.kill(router, signal.SIGKILL)
    page.until(lambda: page.health() == "ok", "all is well again")
    page.until(lambda: page.page.inner_text("#notes") == "", "nothing is left to say")


def test_a_page_whose_server_is_gone_says_so(browser: Any, cluster: Cluster, load: Load) -> None:
    with Page(browser, cluster.addresses["dashboard"], ADMIN) as made:
        made.page.route("**/view*", lambda route: route.abort())
        made.until(lambda: made.health() == "lost", "the page says that its server is gone")
        made.page.unroute("**/view*")
        made.until(lambda: made.health() == "ok", "and that it is back")
