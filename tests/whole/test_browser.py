"""The page in a browser, before an emulated cluster with tenants, one of which floods."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sglang_fair.tenants import file
from tests.support.asking import Asking
from tests.support.browser import IN_A_BROWSER, SIZES, Page, chromium
from tests.support.budget import is_night
from tests.support.live import Cluster
from tests.whole.conftest import ADMIN

pytestmark = [
    *IN_A_BROWSER, pytest.mark.e2e, pytest.mark.machine, pytest.mark.timeout(900), pytest.mark.xdist_group("flooded")
]  # fmt: skip

LOOKS = [(size, scheme) for size in SIZES for scheme in ("light", "dark")]
"""At night all of them, on a push the smallest and the largest."""


@pytest.fixture(scope="module")
def load(flooded: Cluster) -> Iterator[Asking]:
    with Asking(flooded.url, prompt_tokens=600, output_tokens=60) as made:
        made.ask("flood", 48)
        made.ask("light", 1)
        yield made


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as made:
        yield made


@pytest.fixture
def page(browser: Any, flooded: Cluster, load: Asking) -> Iterator[Page]:
    with Page(browser, flooded.addresses["dashboard"], ADMIN) as made:
        yield made
        assert made.trouble == []


def test_the_light_tenant_waits_less_than_the_one_that_floods(page: Page) -> None:
    def waits() -> bool:
        light, flood = page.client("light")["wait"], page.client("flood")["wait"]
        return light is not None and flood is not None and light < flood

    page.until(waits, "the light tenant's wait is below the flooder's")


def test_a_weight_raised_in_the_page_raises_the_share(
    page: Page, load: Asking, flooded_tenants: Path
) -> None:
    load.ask("rival", 48)

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
    assert file.read(flooded_tenants).tenants["rival"].weight == 3
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


@pytest.mark.parametrize(("size", "scheme"), LOOKS if is_night() else [LOOKS[0], LOOKS[-1]])
def test_it_fits_and_everybody_can_read_it(
    browser: Any, flooded: Cluster, load: Asking, size: str, scheme: str
) -> None:
    with Page(browser, flooded.addresses["dashboard"], ADMIN, size, scheme) as made:
        made.until(lambda: made.client("flood")["share"], "shares")
        made.picture(f"dashboard-{size}-{scheme}")
        made.picture(f"whole-{size}-{scheme}", whole=True)
        assert made.page.evaluate("document.documentElement.scrollWidth") <= SIZES[size][0]
        assert made.axe() == []
        made.page.click("#clients tr[data-client=flood] button")
        made.page.wait_for_selector("#weight[open]")
        assert made.axe() == []
        assert made.page.evaluate("document.documentElement.scrollWidth") <= SIZES[size][0]
        assert made.trouble == []


def test_a_router_that_is_killed_is_said_and_comes_back(page: Page, flooded: Cluster) -> None:
    page.until(lambda: page.health() == "ok", "all is well")
    router = flooded.addresses["pids"]["router"]
    os.kill(router, signal.SIGSTOP)  # the cluster starts a dead one again at once: this one is slow to die
    try:
        page.until(lambda: page.health() == "router down", "the page says that the router is down")
        assert "router" in page.page.inner_text("#notes").lower()
        page.picture("router-down")
    finally:
        os.kill(router, signal.SIGKILL)
    page.until(lambda: page.health() == "ok", "all is well again")
    page.until(lambda: page.page.inner_text("#notes") == "", "nothing is left to say")


def test_a_page_whose_server_is_gone_says_so(browser: Any, flooded: Cluster, load: Asking) -> None:
    with Page(browser, flooded.addresses["dashboard"], ADMIN) as made:
        made.page.route("**/view*", lambda route: route.abort())
        made.until(lambda: made.health() == "lost", "the page says that its server is gone")
        made.page.unroute("**/view*")
        made.until(lambda: made.health() == "ok", "and that it is back")
