"""The first hour with a cluster, by the commands of docs/tenants.md and docs/watching.md: keys for two tenants, a
flood, why its requests waited and the other's did not, a larger weight in the file, and the share that follows. All
of it is also seen and done on the page."""

import asyncio
import contextlib
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import aiohttp
import httpx
import pytest

from router.gateway.guard import KEY_VARIABLE
from sglang_fair.common.service_keys import replica_key
from sglang_fair.tenants.file import read
from tests.support.browser import IN_A_BROWSER, Page, chromium
from tests.support.live import EMULATED, Cluster
from tests.support.ports import free_port
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


def in_a_browser(test: Callable[..., None]) -> Callable[..., None]:
    """Marks a test that opens the page."""
    for mark in IN_A_BROWSER:
        test = mark(test)
    return test


ADMIN = "the admin's key"
FLOOD, CALM = 48, 1
"""Requests at a time."""
PROMPT_TOKENS, OUTPUT_TOKENS = 400, 40


def run(*words: str, **environment: str) -> str:
    """What `sglang-fair` prints."""
    command = [sys.executable, "-m", "sglang_fair.cli", *words]
    ended = subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


class Tenant:
    """One with a key, that asks as an application would: so many requests at a time, in a thread of its own."""

    def __init__(self, name: str, key: str, url: str) -> None:
        self.name, self.key = name, key
        self.ids: list[str] = []
        """Of its answers."""
        self._url, self._at_a_time = url, 0
        self._changed = threading.Event()
        self._ends = False
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))

    def __enter__(self) -> "Tenant":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends = True
        self._thread.join()

    def ask(self, at_a_time: int) -> None:
        """From now on, so many at a time."""
        self._at_a_time = at_a_time

    async def _run(self) -> None:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as http, asyncio.TaskGroup() as group:
            for number in range(FLOOD):
                group.create_task(self._asks(http, number))

    async def _asks(self, http: aiohttp.ClientSession, number: int) -> None:
        random = Random(f"{self.name} {number}")
        while not self._ends:
            if number >= self._at_a_time:
                await asyncio.sleep(0.1)
                continue
            body = {
                "prompt": [random.randrange(3, 30_000) for _ in range(PROMPT_TOKENS)],
                "max_tokens": OUTPUT_TOKENS,
                "ignore_eos": True,
            }
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                async with http.post(
                    f"{self._url}/v1/completions", json=body, headers={"authorization": f"Bearer {self.key}"}
                ) as answer:
                    await answer.read()
                    assert answer.status == 200
                    self.ids.append(answer.headers["x-request-id"])


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tenants") / "tenants.yaml"


@pytest.fixture(scope="module")
def keys(file: Path) -> dict[str, str]:
    return {
        name: run("tenants", "add", name, "--tenants", str(file)).strip().splitlines()[-1].split()[-1]
        for name in ("calm", "greedy")
    }


@pytest.fixture(scope="module")
def cluster(file: Path, keys: dict[str, str]) -> Iterator[Cluster]:
    environment = {KEY_VARIABLE: ADMIN, replica_key.variable: "the replicas' key"}
    arguments = (
        "--tenants", str(file), "--admin-port", str(free_port()), "--dashboard-port", str(free_port()),
        "--quantum", "2000",
    )  # fmt: skip
    with Cluster(*EMULATED, *arguments, "--", "--max-running-requests", "8", environment=environment) as made:
        yield made


@pytest.fixture(scope="module")
def tenants(cluster: Cluster, keys: dict[str, str]) -> Iterator[tuple[Tenant, Tenant]]:
    with (
        Tenant("calm", keys["calm"], cluster.url) as calm,
        Tenant("greedy", keys["greedy"], cluster.url) as greedy,
    ):
        yield calm, greedy


@pytest.fixture
def page(cluster: Cluster, tenants: tuple[Tenant, Tenant]) -> Iterator[Page]:
    with chromium() as browser, Page(browser, cluster.addresses["dashboard"], ADMIN) as made:
        yield made
        assert made.trouble == []


def explained(cluster: Cluster, request: str, key: str) -> dict[str, Any]:
    """What a tenant is told of its request: the record of the replica that answered."""
    headers = {"authorization": f"Bearer {key}"}
    answer = httpx.get(f"{cluster.url}/explain/{request}", headers=headers, timeout=30).json()
    record: dict[str, Any] = answer["requests"][0]["attempts"][-1]["replica"][-1]
    return record


def services(cluster: Cluster) -> dict[str, float]:
    """Of all replicas together."""
    books = cluster.books()
    return {
        name: sum(book["clients"].get(name, {}).get("service", 0.0) for book in books)
        for name in ("calm", "greedy")
    }


def test_why_the_greedy_one_waits_and_the_calm_one_does_not(
    cluster: Cluster, tenants: tuple[Tenant, Tenant]
) -> None:
    calm, greedy = tenants
    greedy.ask(FLOOD)
    wait_until(lambda: len(greedy.ids) > 3 * FLOOD, "a flood", 240)
    calm.ask(CALM)
    wait_until(lambda: len(calm.ids) >= 8, "answers for the calm one", 240)
    of_calm = [explained(cluster, one, calm.key) for one in calm.ids[-5:]]
    of_greedy = [explained(cluster, one, greedy.key) for one in greedy.ids[-FLOOD:]]
    for record in (*of_calm, *of_greedy):
        assert record["outcome"] == "finished"
        assert sum(record["waited_for_s"].values()) == pytest.approx(record["waited_s"], abs=0.01)
    waits = [median(one["waited_s"] for one in records) for records in (of_calm, of_greedy)]
    assert waits[0] < waits[1], "the flood waits for itself"
    assert any(one["overtaken_by"] for one in of_greedy), "calm's later requests went before greedy's"
    request = greedy.ids[-1]
    said = run("explain", request, "--gateway", cluster.url, OPENAI_API_KEY=greedy.key)
    assert request in said
    assert "waited" in said


def test_neither_is_told_of_the_other(cluster: Cluster, tenants: tuple[Tenant, Tenant]) -> None:
    calm, greedy = tenants
    headers = {"authorization": f"Bearer {calm.key}"}
    assert (
        httpx.get(f"{cluster.url}/explain/{greedy.ids[-1]}", headers=headers, timeout=30).status_code == 404
    )
    own = httpx.get(f"{cluster.url}/explain/{calm.ids[-1]}", headers=headers, timeout=30)
    assert own.status_code == 200
    assert "greedy" not in own.text
    assert httpx.get(f"{cluster.url}/status", headers=headers, timeout=30).status_code in (401, 403, 404)
    usage = httpx.get(f"{cluster.url}/v1/usage", headers=headers, timeout=30)
    assert usage.status_code == 200
    assert "greedy" not in usage.text


@in_a_browser
def test_the_page_says_why_too(page: Page) -> None:
    def waits() -> bool:
        calm, greedy = page.client("calm")["wait"], page.client("greedy")["wait"]
        return calm is not None and greedy is not None and calm < greedy

    page.until(waits, "the calm one's wait is below the greedy one's")
    for name in ("calm", "greedy"):
        page.page.select_option("#of", name)
        page.page.click(f"#requests tbody tr[data-client={name}]:has(.badge[data-state=ok]) button")
        page.page.wait_for_selector(f"#explanation .said:has-text('of client {name}')")
        assert "replica: waited" in page.page.inner_text("#explanation")
        page.page.keyboard.press("Escape")
        page.page.wait_for_selector("#explain", state="hidden")


def test_a_larger_weight_in_the_file_and_the_share_follows(
    cluster: Cluster, tenants: tuple[Tenant, Tenant], file: Path
) -> None:
    tenants[0].ask(FLOOD)

    def part_of_greedy() -> float:
        """Of the next seconds' service."""
        before = services(cluster)
        wait_until(lambda: sum(services(cluster).values()) > sum(before.values()) + 60_000, "service", 240)
        got = {name: service - before[name] for name, service in services(cluster).items()}
        return got["greedy"] / sum(got.values())

    wait_until(lambda: 0.42 < part_of_greedy() < 0.58, "two that flood have equal shares", 300)
    text = file.read_text()
    assert re.search(r"^  greedy:$", text, re.MULTILINE)
    if "weight" in text.split("greedy:")[1]:
        text = re.sub(r"(greedy:\n(?:    .*\n)*?    weight: )[\d.]+", r"\g<1>3", text)
    else:
        text = text.replace("  greedy:\n", "  greedy:\n    weight: 3\n")
    new = file.with_suffix(".new")
    new.write_text(text)
    new.replace(file)
    wait_until(lambda: 0.68 < part_of_greedy() < 0.82, "three quarters of the service", 300)
    said = run(
        "status",
        cluster.addresses["admin"],
        SGLANG_FAIR_ADMIN_KEY=ADMIN,
        SGLANG_FAIR_REPLICA_KEY="the replicas' key",
    )
    assert "greedy" in said


@in_a_browser
def test_the_page_shows_the_weight_and_takes_it_back(page: Page, file: Path) -> None:
    def ratio() -> float:
        """Greedy's share over calm's; 0 before the page has any."""
        calm, greedy = page.client("calm")["share"], page.client("greedy")["share"]
        return greedy / calm if calm and greedy else 0.0

    page.until(
        lambda: page.client("greedy")["weight"] == 3 and ratio() > 2.2, "three quarters of the service"
    )
    page.page.click("#clients tr[data-client=greedy] button")
    page.page.fill("#weight-value", "1")
    page.page.click("#weight-form button.main")
    page.page.wait_for_selector("#weight", state="hidden")
    assert read(file).tenants["greedy"].weight == 1
    page.until(lambda: page.client("greedy")["weight"] == 1 and 0.6 < ratio() < 1.6, "equal shares again")
