"""Who may open the page, what it answers, and how it asks the cluster, which is a stand-in here."""

import asyncio
import base64
import json
import os
import pty
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from sglang_fair.common.service_keys import admin_key, replica_key
from sglang_fair.dashboard.__main__ import main
from sglang_fair.dashboard.server import application
from tests.support.ports import free_port

KEY = "the admin's clé"
EVERY_S = 0.2
ROW = {
    "service": 10.0,
    "extend_tokens": 10,
    "requests": 1,
    "weight": 1.0,
    "waiting": 2,
    "backlog": 1,
    "counter": -5.0,
}


class StandIn:
    """A gateway and a replica."""

    def __init__(self) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.front: dict[str, Any] = {"fallback": False}
        self.refuses = False
        self.asked: list[tuple[str, str, str | None, Any]] = []

    async def answer(self, request: web.Request) -> web.Response:
        body = await request.json() if request.can_read_body else None
        self.asked.append((request.method, request.path, request.headers.get("authorization"), body))
        if self.refuses:
            return web.json_response({"error": {"message": "no"}}, status=409)
        match request.method, request.path:
            case "GET", "/status":
                return web.json_response({"gateway": self.front, "workers": {"r0": {"url": self.url}}})
            case _, "/fair":
                report = {
                    "policy": "dlpm",
                    "clients": {"<b>gold</b>": ROW},
                    "totals": {"extend_tokens": 10},
                    "bound": 9.0,
                }
                return web.json_response(report)
            case "GET", "/requests":
                return web.json_response({"requests": [{"id": "a/b", "client": request.query.get("client")}]})
            case "GET", "/explain/a/b":
                return web.json_response({"requests": [], "router": "gone"})
            case _:
                return web.json_response({"path": request.path})


@asynccontextmanager
async def served(app: web.Application, port: int) -> AsyncIterator[None]:
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    try:
        yield
    finally:
        await runner.cleanup()


Ask = Callable[..., Awaitable[tuple[int, Any]]]


@asynccontextmanager
async def page(key: str = "") -> AsyncIterator[tuple[StandIn, Ask]]:
    """The page before a stand-in, and how to ask it: method, path and aiohttp's arguments."""
    stand_in, port = StandIn(), free_port()
    cluster = web.Application()
    cluster.router.add_route("*", "/{path:.*}", stand_in.answer)
    async with (
        served(cluster, stand_in.port),
        served(application(stand_in.url, EVERY_S, key), port),
        aiohttp.ClientSession(f"http://127.0.0.1:{port}") as http,
    ):

        async def ask(method: str, path: str, **more: Any) -> tuple[int, Any]:
            async with http.request(method, path, allow_redirects=False, **more) as answer:
                raw = await answer.read()
                assert "default-src 'none'" in answer.headers["content-security-policy"]
                return answer.status, json.loads(raw) if answer.content_type == "application/json" else raw

        yield stand_in, ask


def running(test: Callable[[StandIn, Ask], Awaitable[None]], key: str = "") -> None:
    async def whole() -> None:
        async with page(key) as (stand_in, ask):
            await test(stand_in, ask)

    asyncio.run(whole())


async def seen(ask: Ask, health: str) -> dict[str, Any]:
    """The view, once it says that."""
    while True:
        status, view = await ask("GET", "/view")
        assert status == 200
        if view["health"] == health:
            return view
        await asyncio.sleep(0.05)


def test_the_page_shows_the_cluster_and_what_becomes_of_it() -> None:
    async def test(stand_in: StandIn, ask: Ask) -> None:
        view = await seen(ask, "ok")
        assert view["clients"][0]["name"] == "<b>gold</b>"
        assert view["clients"][0]["deficits"] == {"r0": -5.0}
        stand_in.front["fallback"] = True
        await seen(ask, "router down")
        stand_in.refuses = True
        view = await seen(ask, "gateway down")
        assert view["replicas"][0]["state"] == "silent"

    running(test)


def test_one_look_is_enough_for_any_number_of_viewers() -> None:
    async def test(stand_in: StandIn, ask: Ask) -> None:
        await seen(ask, "ok")
        before, began_s = len(stand_in.asked), time.monotonic()
        await asyncio.gather(*(ask("GET", "/view") for _ in range(200)))
        for _ in range(200):
            await ask("GET", "/view")
        looks = [path for _, path, _, _ in stand_in.asked[before:] if path == "/status"]
        least_s = EVERY_S / 2  # between two looks, where the first took long
        assert len(looks) <= (time.monotonic() - began_s) / least_s + 2, "the viewers asked the gateway"

    running(test)


def test_a_weight_goes_to_the_replicas_or_into_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(admin_key.variable, "admin")
    monkeypatch.setenv(replica_key.variable, "replica")

    async def test(stand_in: StandIn, ask: Ask) -> None:
        await seen(ask, "ok")
        assert await ask("PATCH", "/clients/a%2Fb", json={"weight": 3}) == (200, {"weight": 3.0})
        assert ("POST", "/fair", "Bearer replica", {"client_weights": {"a/b": 3.0}}) in stand_in.asked
        stand_in.front["tenants"] = {"tenants": 1}
        while (await ask("GET", "/view"))[1]["weights"] != "file":
            await asyncio.sleep(0.05)
        assert (await ask("PATCH", "/clients/a%2Fb", json={"weight": 0.5}))[0] == 200
        assert ("PATCH", "/tenants/a/b", "Bearer admin", {"weight": 0.5}) in stand_in.asked
        stand_in.refuses = True
        status, said = await ask("PATCH", "/clients/gold", json={"weight": 2})
        assert (status, said["error"]["message"]) == (409, "no")

    running(test)


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b"3", b'{"weight": "3"}', b'{"weight": true}', b'{"weight": 0}', b'{"weight": -1}', b'{"weight": 1e9}',
     b'{"weight": NaN}', b'{"weight": Infinity}', b"[" * 4000],
)  # fmt: skip
def test_what_is_no_weight_is_refused_and_nobody_is_asked(body: bytes) -> None:
    async def test(stand_in: StandIn, ask: Ask) -> None:
        as_json = {"content-type": "application/json"}
        assert (await ask("PATCH", "/clients/gold", data=body, headers=as_json))[0] == 400
        assert all(method == "GET" for method, *_ in stand_in.asked)

    running(test)


def test_requests_are_asked_for_and_explained_and_spans_are_those_that_there_are() -> None:
    async def test(stand_in: StandIn, ask: Ask) -> None:
        assert (await ask("GET", "/view?span=24+h"))[0] == 200
        assert (await ask("GET", "/view?span=x"))[0] == 400
        assert await ask("GET", "/requests?client=a%26b") == (
            200,
            {"requests": [{"id": "a/b", "client": "a&b"}]},
        )
        status, said = await ask("GET", "/requests/a%2Fb")
        assert (status, said["text"]) == (200, "The router could not be asked: gone.")
        assert ("GET", "/explain/a/b") in [(method, path) for method, path, *_ in stand_in.asked]

    running(test)


# -- who may


def basic(password: str) -> str:
    return "Basic " + base64.b64encode(f"anybody:{password}".encode()).decode()


def test_with_a_key_nothing_opens_without_it() -> None:
    async def test(stand_in: StandIn, ask: Ask) -> None:
        for given in ("", "Bearer wrong", f"Digest {KEY}", basic("wrong"), "Basic ?", "Basic AAAA"):
            for method, path in (
                ("GET", "/"), ("GET", "/view"), ("GET", "/requests/1"), ("PATCH", "/clients/a"), ("GET", "/app.js")
            ):  # fmt: skip
                assert (await ask(method, path, headers={"authorization": given}))[0] == 401, (given, path)
        assert (await ask("GET", "/health"))[0] == 200
        for given in (f"Bearer {KEY}", f"bearer  {KEY}", basic(KEY)):
            for path in ("/", "/view"):
                assert (await ask("GET", path, headers={"authorization": given}))[0] == 200

    running(test, KEY)


def test_without_a_key_other_sites_and_other_names_open_nothing() -> None:
    """All that `objection` has to say: tests/common/test_guard.py."""

    async def test(stand_in: StandIn, ask: Ask) -> None:
        headers = {"sec-fetch-site": "same-site"}
        assert (await ask("PATCH", "/clients/a", json={"weight": 2}, headers=headers))[0] == 403
        assert all(method == "GET" for method, *_ in stand_in.asked)
        for host in ("127.0.0.1.evil.example", "["):
            assert (await ask("GET", "/view", headers={"host": host}))[0] in (400, 403), host
        for host in ("localhost:1", "[::1]:80"):
            assert (await ask("GET", "/view", headers={"host": host}))[0] == 200

    running(test)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--gateway", "127.0.0.1:8000"], "--gateway must be an address"),
        (["--gateway", "http://[:1"], "--gateway must be an address"),
        (["--host", "0.0.0.0"], "this machine alone"),
        (["--every", "0"], "--every"),
    ],
)
def test_what_cannot_be_served_is_said(
    arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(admin_key.variable, raising=False)
    assert main(arguments) == 2
    assert said in capsys.readouterr().err


# -- the terminal


@pytest.mark.parametrize("leaves", ["q", "its terminal is gone"])
def test_top_shows_the_same_until(leaves: str) -> None:
    """On a terminal of its own."""

    async def whole() -> None:
        stand_in = StandIn()
        cluster = web.Application()
        cluster.router.add_route("*", "/{path:.*}", stand_in.answer)
        shown = bytearray()

        async def until(text: str) -> None:
            for _ in range(400):
                if text.encode() in shown:
                    return
                await asyncio.sleep(0.05)
            raise AssertionError(f"no {text}: {shown.decode()}")

        async with served(cluster, stand_in.port):
            ours, its = pty.openpty()
            asyncio.get_running_loop().add_reader(ours, lambda: shown.extend(os.read(ours, 1 << 16)))
            command = [sys.executable, "-m", "sglang_fair.dashboard.top", stand_in.url, "--every", "0.2"]
            top = subprocess.Popen(
                command,
                stdin=its,
                stdout=its,
                stderr=its,
                env=os.environ | {"TERM": "xterm", "COLUMNS": "160", "LINES": "40"},
            )
            try:
                for text in ("<b>gold</b>", "-5", "all well", "the last 10 min"):
                    await until(text)
                stand_in.front["fallback"] = True
                await until("router down")
                os.write(ours, b"s")
                await until("the last 2 h")
                os.write(ours, b"q" if leaves == "q" else b"")
                asyncio.get_running_loop().remove_reader(ours)
                if leaves != "q":
                    os.close(ours)
                assert await asyncio.to_thread(top.wait, 20) == 0 or leaves != "q"
            finally:
                top.kill()

    asyncio.run(whole())
