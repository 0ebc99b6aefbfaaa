"""Who may ask: identity from keys and trusted proxies, a tenants' file that changes, and what each key opens."""

import asyncio
import json
import os
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.gateway.access.identity import Directory, Identity, is_trusted
from router.gateway.address import check_free
from router.gateway.app import App, create_app
from router.gateway.errors import ApiError
from router.gateway.guard import KEY_VARIABLE
from router.gateway.openapi import describe
from router.gateway.settings import networks_in
from sglang_fair.common.caller import HEADER_WEIGHT
from sglang_fair.common.identity import API_KEY, DEFAULT_ORDER, USER
from sglang_fair.common.service_keys import bearer
from sglang_fair.settings.setting import SettingError
from sglang_fair.tenants import edit, keys
from tests.gateway.clusters import add_tenant, gateway_settings, served
from tests.support import apis
from tests.support.ports import free_port
from tests.support.stand_in import MODEL, make_tokenizer
from tests.support.waiting import eventually

GOLD, SILVER, ADMIN, INVENTED = "key of gold", "key of silver", "the admin's key", "sk-fair-invented"
PROXY, ELSEWHERE = ("10.1.2.3", 1), ("192.0.2.1", 1)
HEADERS = [*(place for place in DEFAULT_ORDER if place not in (API_KEY, USER)), HEADER_WEIGHT]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tenants") / "t.yaml"
    add_tenant(made, "gold", GOLD, weight=3.0, cache_group="g")
    add_tenant(made, "silver", SILVER, models=["other", f"{MODEL}:a"])
    return made


def identity(path: Path | None, trusted: str | None = None) -> tuple[Identity, Counter[str]]:
    """And what it counts of ignored headers."""
    ignored = Counter[str]()
    directory = None if path is None else Directory(path)
    networks = None if trusted is None else networks_in(trusted)
    return Identity(DEFAULT_ORDER, lambda _, name: ignored.update([name]), directory, networks), ignored


# -- proxies


@pytest.mark.parametrize(
    ("networks", "peer", "trusted"),
    [
        ("10.0.0.0/8", "10.1.2.3", True),
        ("10.0.0.0/8", "11.1.2.3", False),
        ("10.0.0.0/8", "::ffff:10.1.2.3", True),
        ("10.1.2.3", "10.1.2.3", True),
        ("fd00::/8, 10.0.0.0/8", "fd00::1", True),
        ("fd00::/8", "fe80::1%eth0", False),
        ("10.0.0.0/8", "::10.1.2.3", False),
        ("0.0.0.0/0", "name", False),
        ("", "10.1.2.3", False),
    ],
)
def test_networks(networks: str, peer: str, trusted: bool) -> None:
    assert is_trusted(networks_in(networks), (peer, 1)) is trusted
    assert not is_trusted(networks_in(networks), None)


@pytest.mark.parametrize("text", ["10.0.0.1/8", "x", "10.0.0.0/33", "10.0.0.0 /8,y"])
def test_what_is_no_network(text: str) -> None:
    with pytest.raises(SettingError, match="--trusted-proxies: "):
        networks_in(text)


# -- identity


def test_the_key_says_who_asks(path: Path) -> None:
    who, ignored = identity(path)
    found = who.of(bearer(GOLD), ELSEWHERE)
    assert (found.caller.client, found.caller.weight, found.caller.group) == ("gold", 3.0, "g")
    assert who.of({"authorization": f"bearer  {SILVER} "}, ELSEWHERE).caller.client == "silver"
    assert who.of(bearer(GOLD), ELSEWHERE, "somebody").caller.client == "gold"
    assert ignored == {}


@given(
    headers=st.dictionaries(st.sampled_from([*HEADERS, "x-forwarded-for", "x-real-ip"]), st.text(max_size=9)),
    key=st.one_of(st.none(), st.text(max_size=60), st.sampled_from([GOLD, SILVER])),
    scheme=st.sampled_from(["Bearer", "Basic", ""]),
    user=st.one_of(st.none(), st.text(max_size=9)),
)
def test_no_header_from_elsewhere_changes_who_asks(
    path: Path, headers: dict[str, str], key: str | None, scheme: str, user: str | None
) -> None:
    """The adversary may send any headers: it is the tenant of its key, or nobody, and each header is counted."""
    who, ignored = identity(path, "10.0.0.0/8")
    sent = headers | ({} if key is None else {"authorization": f"{scheme} {key}"})
    expected = {GOLD: "gold", SILVER: "silver"}.get((key or "").strip()) if scheme == "Bearer" else None
    try:
        found: object = who.of(sent, ELSEWHERE, None).caller.client
        if user is not None:
            assert who.of(sent, ELSEWHERE, user).caller.client == found
    except ApiError as error:
        found = error.status, error.headers
    assert found == (expected or (401, {"www-authenticate": "Bearer"}))
    assert ignored == {name: 1 for name in headers if name in HEADERS}


def test_a_trusted_proxy_names_a_tenant(path: Path) -> None:
    who, ignored = identity(path, "10.0.0.0/8")
    assert who.of({"x-fair-client": "silver"}, PROXY).caller.client == "silver"
    assert who.of({"x-tenant-id": "silver"} | bearer(GOLD), PROXY).caller.client == "silver"
    assert who.of(bearer(GOLD), PROXY).caller.client == "gold"
    for headers in ({"x-fair-client": "bronze"}, {"x-fair-client": "gold2"} | bearer(GOLD), {}):
        with pytest.raises(ApiError):
            who.of(headers, PROXY)
    assert ignored == {}


def test_without_a_file_headers_count_from_everywhere_or_from_proxies_alone() -> None:
    who, ignored = identity(None)
    assert who.of({"x-fair-client": "me"}, ELSEWHERE).caller.client == "me"
    assert who.of(bearer("k"), ELSEWHERE).caller.client.startswith("key:")
    assert ignored == {}
    who, ignored = identity(None, "10.0.0.0/8")
    assert who.of({"x-fair-client": "me"}, PROXY).caller.client == "me"
    assert who.of({"x-fair-client": "me"}, ELSEWHERE).caller.client == "anonymous"
    assert who.of({"x-fair-client": "me"} | bearer("k"), ELSEWHERE).caller.client.startswith("key:")
    assert ignored == {"x-fair-client": 2}


# -- the file changes


@pytest.fixture
def changing(tmp_path: Path) -> Path:
    made = tmp_path / "t.yaml"
    add_tenant(made, "gold", GOLD)
    return made


async def looks(directory: Directory) -> None:
    for _ in range(2):
        await directory.look()


def later(path: Path) -> None:
    """As if it were written later: clocks of files are coarse."""
    found = path.stat()
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns + 5_000_000))


TEXTS: dict[str, Callable[[str], str]] = {
    "half": lambda whole: whole[:-30],
    "empty": lambda whole: "",
    "wrong": lambda whole: whole.replace("keys", "kyes"),
    "twice": lambda whole: whole + whole.partition("\n")[2].partition("tenants:\n")[2],
    "a circle": lambda whole: "tenants: &a {b: *a}\n",
}


def spoil(path: Path, how: str) -> None:
    match how:
        case "garbage":
            path.write_bytes(b"\xff\x00\xfe")
        case "huge":
            os.truncate(path, 1 << 40)
        case "gone" | "a folder" | "a pipe":
            path.unlink()
            {"gone": lambda _: None, "a folder": os.mkdir, "a pipe": os.mkfifo}[how](path)
        case _:
            path.write_text(TEXTS[how](path.read_text()))


@pytest.mark.parametrize("how", [*TEXTS, "garbage", "huge", "gone", "a folder", "a pipe"])
async def test_a_bad_file_changes_nothing_and_is_counted_once(changing: Path, how: str) -> None:
    directory, whole = Directory(changing), changing.read_text()
    before = directory.by_key(GOLD)
    spoil(changing, how)
    for _ in range(3):
        await looks(directory)
    assert directory.by_key(GOLD) == before
    assert (directory.failures, directory.reloads) == (1, 0)
    assert str(changing) in directory.error
    if changing.is_dir():
        changing.rmdir()
    changing.unlink(missing_ok=True)
    changing.write_text(whole)
    later(changing)
    add_tenant(changing, "silver", SILVER)
    await looks(directory)
    assert directory.by_key(SILVER) is not None
    assert (directory.failures, directory.reloads, directory.error) == (1, 1, "")


async def test_a_file_that_is_being_written_is_left_alone(changing: Path) -> None:
    directory = Directory(changing)
    whole = changing.read_text()
    with changing.open("w") as out:
        for character in whole:  # a look between any two writes
            out.write(character)
            out.flush()
            later(changing)
            await directory.look()
    await looks(directory)
    assert directory.failures == 0
    assert directory.by_key(GOLD) is not None


async def test_keys_and_weights_follow_the_file(changing: Path) -> None:
    directory = Directory(changing)
    first = directory.by_key(GOLD)
    assert first is not None
    edit.set_keys(changing, "gold", lambda old: [keys.written(keys.digest("new"))])
    await looks(directory)
    assert directory.by_key(GOLD) is None
    second = directory.by_key("new")
    assert second is not None
    assert second.caller.version > first.caller.version
    os.utime(changing, ns=(0, 0))  # put back from an archive
    await looks(directory)
    third = directory.by_key("new")
    assert third is not None
    assert third.caller.version > second.caller.version
    edit.remove(changing, "gold")
    await looks(directory)
    assert directory.by_key("new") is None
    assert directory.by_name("gold") is None


# -- what each key opens

CHAT = {"messages": [{"role": "user", "content": "x"}]}
BODIES: dict[str, Any] = {
    **apis.BODIES,
    "/workers": {"url": "http://127.0.0.1:1"},
    "/limits": {"user": 1},
    "/swap": {"worker": "r0", "model": MODEL},
    "/tenants/{name}": {"weight": 2},
    "/v1/batches": {"input_file_id": "file-", "endpoint": "/v1/completions", "completion_window": "24h"},
}
# By what no key, an invented one, a tenant's and the admin's get: routes. There is no router: 503 is what gets through.
# All others are 404 to everybody.
CLIENTS_ADDRESS = {
    (401, 401, 503, 401): (
        "post /v1/chat/completions, post /v1/completions, post /generate, post /v1/responses, "
        "post /v1/messages, post /v1/embeddings, post /encode, post /v1/messages/count_tokens, post /tokenize, "
        "post /detokenize, get /model_info, get /get_model_info, get /server_info, get /get_server_info"
    ),
    (
        401,
        401,
        200,
        401,
    ): "get /v1/models, get /v1/models/{id}, get /v1/usage, get /v1/files, get /v1/batches",
    (401, 401, 404, 401): (
        "get /v1/files/{id}, delete /v1/files/{id}, get /v1/files/{id}/content, post /v1/batches, get "
        "/v1/batches/{id}, post /v1/batches/{id}/cancel, get /explain/{id}, post /concate_and_append_request"
    ),
    (401, 401, 400, 401): "post /v1/files",
    (503, 503, 503, 503): "get /health, get /readyz",
    (200, 200, 200, 200): "get /healthz",
}
OPERATORS_ADDRESS = {
    (401, 401, 401, 404): "get /explain/{id}, patch /tenants/{name}",
    (401, 401, 401, 200): "get /requests, get /status, get /metrics",
    (401, 401, 401, 503): (
        "get /workers, delete /workers/{name}, get /limits, post /limits, post /swap, post /flush_cache, "
        "delete /quarantine/{client}"
    ),
    (401, 401, 401, 400): "post /workers",
}
ROUTES = [f"{method} {route}" for route, found in describe("1")["paths"].items() for method in found]


@asynccontextmanager
async def asking(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, admin_key: str = "", **config: Any
) -> AsyncIterator[tuple[App, httpx.AsyncClient, httpx.AsyncClient]]:
    """A gateway that has no router, its clients' address and its operators'."""
    monkeypatch.setenv(KEY_VARIABLE, admin_key)
    port = free_port()
    app = made(tmp_path, **{"admin_port": port, **config})
    async with (
        served(app) as url,
        httpx.AsyncClient(base_url=url) as clients,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as operators,
    ):
        yield app, clients, operators


AS_JSON = {"content-type": "application/json"}


async def ask(
    http: httpx.AsyncClient, asked: str, key: str | None, more: Mapping[str, str] = MappingProxyType({})
) -> int:
    method, route = asked.split()
    target = route.replace("{id}", MODEL).replace("{name}", "r0")
    headers = (bearer(key) if key is not None else {}) | dict(more)
    body = BODIES.get(route) if method in ("post", "patch") else None
    return (await http.request(method, target, headers=headers, json=body)).status_code


def made(tmp_path: Path, **config: Any) -> App:
    config = {"batches": str(tmp_path / "batches"), **config}
    return create_app(
        gateway_settings("tcp://127.0.0.1:17998", make_tokenizer(tmp_path), router_timeout_s=0.1, **config)
    )


@pytest.mark.slow
async def test_what_each_key_opens(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with asking(tmp_path, monkeypatch, ADMIN, tenants=str(path)) as (_, clients, operators):
        for http, table in ((clients, CLIENTS_ADDRESS), (operators, OPERATORS_ADDRESS)):
            expected = dict.fromkeys(ROUTES, (404, 404, 404, 404))
            for statuses, routes in table.items():
                expected |= dict.fromkeys(routes.split(", "), statuses)
            for route, statuses in expected.items():
                got = tuple([await ask(http, route, key) for key in (None, INVENTED, GOLD, ADMIN)])
                assert got == statuses, (http.base_url, route)


async def test_without_an_admin_key_nobody_is_an_operator(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with asking(tmp_path, monkeypatch, tenants=str(path)) as (_, _, operators):
        for route in ("get /status", "get /workers", "delete /workers/{name}"):
            for key in (None, "x", GOLD, ADMIN):
                assert await ask(operators, route, key) == 403


def test_an_address_that_is_taken_is_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=f"^--admin-port: 127.0.0.1:{port}: Address already in use$"):
            check_free("127.0.0.1", port, shared=False)
    check_free("127.0.0.1", port, shared=False)


@pytest.mark.parametrize("key", ["", ADMIN])
async def test_operators_are_on_this_machine_or_have_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    """A proxy on this machine is neither: its headers say who asks."""
    far, through = {"x-forwarded-for": "192.0.2.1"}, (200, 503)  # 503: there is no router
    async with asking(tmp_path, monkeypatch, key) as (_, _, operators):

        async def got(route: str, headers: dict[str, str]) -> int:
            return (await operators.get(route, headers=headers)).status_code

        for route in ("/status", "/metrics", "/workers"):
            for wrong in (far, far | bearer("wrong")):
                assert await got(route, wrong) == (401 if key else 403)
            assert (await got(route, {}) in through) is not bool(key)
            assert (await got(route, far | bearer(key)) in through) is bool(key)


async def test_without_tenants_all_is_at_one_address_as_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with asking(tmp_path, monkeypatch, admin_port=None) as (_, clients, _):
        got = {route: await ask(clients, route, None) for route in ROUTES if "/tenants" not in route}
    assert 401 not in got.values()
    unknown = {route for route, status in got.items() if status == 404 and "/v1/" not in route}
    assert unknown == {"get /explain/{id}", "post /concate_and_append_request"}
    assert got["get /status"] == 200


FOREIGN = ({"host": "evil.example"}, {"origin": "http://evil.example"}, {"sec-fetch-site": "cross-site"})
OPEN = ("get /health", "get /healthz", "get /readyz")


async def test_without_keys_another_site_s_page_gets_and_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with asking(tmp_path, monkeypatch, admin_port=None) as (_, clients, _):
        for route in ROUTES:
            if "/tenants" in route or route in OPEN:
                continue
            for headers in FOREIGN:
                assert await ask(clients, route, None, headers) == 403, (route, headers)
        for route in ("/workers", "/limits", "/swap"):  # as a form can send it
            sent = await clients.post(
                route, content=json.dumps(BODIES[route]), headers={"content-type": "text/plain"}
            )
            assert sent.status_code == 403


async def test_a_tenant_sees_the_models_that_it_may_ask_for(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with asking(tmp_path, monkeypatch, tenants=str(path)) as (_, clients, _):
        for key, models in ((GOLD, [MODEL]), (SILVER, [f"{MODEL}:a"])):
            listed = (await clients.get("/v1/models", headers=bearer(key))).json()["data"]
            assert [one["id"] for one in listed] == models
        assert (await clients.get(f"/v1/models/{MODEL}", headers=bearer(SILVER))).status_code == 404


def test_an_address_documents_what_it_has(path: Path, tmp_path: Path) -> None:
    app = made(tmp_path, tenants=str(path), admin_port=free_port())
    opened = {route.split()[1] for routes in CLIENTS_ADDRESS.values() for route in routes.split(", ")}
    assert set(app.pages.openapi()["paths"]) == opened


async def test_an_operator_changes_a_weight_and_the_gateway_follows(
    changing: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with asking(tmp_path, monkeypatch, ADMIN, tenants=str(changing)) as (app, _, operators):
        directory = app.gateway.directory
        assert directory is not None

        async def patch(body: bytes) -> httpx.Response:
            return await operators.patch("/tenants/gold", content=body, headers=bearer(ADMIN) | AS_JSON)

        for body in (b"", b'{"weight": 0}', b'{"weight": "2"}', b'{"weight": 2, "keys": []}', b"[" * 4000):
            assert (await patch(body)).status_code == 400
        assert (await patch(b" " * 5000)).status_code == 413
        answer = await patch(b'{"weight": 2.5}')
        assert (answer.status_code, answer.json()) == (200, {"name": "gold", "weight": 2.5})

        def weight() -> float:
            known = directory.by_key(GOLD)
            assert known is not None
            return known.caller.weight

        await eventually(lambda: weight() == 2.5, "the gateway has read the file again")
        changing.write_text("tenants: {gold: {weight: 1}, gold: {}}")
        assert (await patch(b'{"weight": 3}')).status_code == 409


async def test_half_heads_leave_the_operators_port_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = {"max_connections": 6, "head_timeout_s": 1.0}
    async with asking(tmp_path, monkeypatch, **limits) as (_, _, operators):
        port = operators.base_url.port
        half = [await asyncio.open_connection("127.0.0.1", port) for _ in range(20)]
        refused = 0
        for reader, writer in half:
            writer.write(b"GET /status HTTP/1.1\r\n")
            with suppress(ConnectionError):
                refused += (await reader.read()).startswith(b"HTTP/1.1 429 ")
            writer.close()
        assert refused == 17
        assert (await operators.get("/workers")).status_code == 503
