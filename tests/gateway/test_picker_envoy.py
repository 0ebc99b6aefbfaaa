"""The endpoint picker behind a real Envoy, in front of small replicas: what only Envoy can show."""

import asyncio
import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

pytest.importorskip("grpclib", reason="no sglang-fair[picker]")

from router.picker.__main__ import READY
from sglang_fair.bench.envoy import config
from tests.gateway.clusters import CHAT, DONE, Cluster, add_tenant, held_router
from tests.gateway.pickers import CHAT_PATH, Picking, behind_envoy, picking
from tests.support.envoy import envoy_program, envoy_started
from tests.support.ports import free_port
from tests.support.stand_in import MODEL
from tests.support.waiting import DEADLINE_S, eventually

pytestmark = [pytest.mark.slow, pytest.mark.cluster(replicas=2)]

STREAM = CHAT | {"stream": True}


@pytest.fixture(autouse=True)
def program() -> str:
    return envoy_program()


@contextlib.asynccontextmanager
async def through_envoy(
    c: Cluster, tokenizer: Path, folder: Path, envoy: dict[str, Any] | None = None, **settings: Any
) -> AsyncIterator[tuple[Picking, str]]:
    async with picking(c, tokenizer, **settings) as p, behind_envoy(p, folder, **(envoy or {})) as url:
        yield p, url


def test_the_configuration_that_is_shipped_is_that_of_the_tests(program: str) -> None:
    file = Path(__file__).parents[2] / "deploy/envoy/picker.yaml"
    assert yaml.safe_load(file.read_text()) == config(8080, (30000, 30001), 9002, tls=True)
    subprocess.run([program, "--mode", "validate", "-c", str(file)], check=True, capture_output=True)


async def test_streams_answers_and_refusals(c: Cluster, tokenizer: Path, tmp_path: Path) -> None:
    """Over TLS, with the picker's own certificate, for a client with a key."""
    tenants = tmp_path / "tenants.yaml"
    add_tenant(tenants, "a", limits={"requests_per_minute": 2})
    more = {"plaintext": False, "tenants": str(tenants)}
    async with through_envoy(c, tokenizer, tmp_path, {"tls": True}, **more) as (p, url):
        status, headers, body = await p.post(url, STREAM, authorization="Bearer a")
        assert (status, headers["x-fair-client"], headers["x-ratelimit-remaining-requests"]) == (
            200,
            "a",
            "1",
        )
        assert body.endswith(DONE)
        assert b'"usage":{' not in body  # which was asked for, and is hidden
        text = "word " * 100_000
        long = CHAT | {"messages": [{"role": "user", "content": text}]}
        status, _, body = await p.post(url, long, authorization="Bearer a")
        assert (status, json.loads(body)["usage"]["completion_tokens"]) == (200, 3)
        path, sent, forwarded = next(
            one for r in c.replicas for one in r.requests if one[2] != {} and "stream" not in one[2]
        )
        assert path == CHAT_PATH
        assert forwarded["messages"][0]["content"] == text
        assert (sent["x-fair-client"], "Authorization" in sent) == ("a", False)
        for key, refused in (("a", 429), ("b", 401)):
            status, headers, body = await p.post(url, CHAT, authorization=f"Bearer {key}")
            assert status == refused
            assert json.loads(body)["error"]["code"] in ("rate_limit_exceeded", "invalid_api_key")
        async with c.http.get(f"{url}/v1/models", headers={"authorization": "Bearer a"}) as models:
            assert (await models.json())["data"][0]["id"] == MODEL
    found = await c.ended(ok=2)
    assert found["counts"]["output_tokens"] == 6


async def test_a_client_that_leaves(c: Cluster, tokenizer: Path, tmp_path: Path) -> None:
    for replica in c.replicas:
        replica.mode = "endless"
    async with through_envoy(c, tokenizer, tmp_path) as (p, url):
        async with c.http.post(url + CHAT_PATH, json=STREAM) as response:
            await response.content.readany()
        await eventually(lambda: not p.gateway.fleet.in_flight, "the picker knows")
        await eventually(lambda: any(one.aborted for one in c.replicas), "the replica is told")
        await c.ended(aborted=1)


async def test_a_replica_that_is_gone_is_passed_over(c: Cluster, tokenizer: Path, tmp_path: Path) -> None:
    """By Envoy, before anybody knows; whoever served is charged."""
    async with through_envoy(c, tokenizer, tmp_path) as (p, url):
        for gateway in (c.gateway, p.gateway):
            gateway.fleet.is_well = lambda name: True
        await c.replicas[0].close()
        served = set()
        for _ in range(2):  # in turn: one of them is sent to the dead one
            status, headers, _ = await p.post(url, CHAT)
            assert status == 200
            served.add(headers["x-fair-worker"])
        assert served == {"r1"}

        async def is_counted() -> bool:
            return (await c.state())["counts"].get("ended ok") == 2

        await eventually(is_counted, "the router has heard of it")
        found = (await c.state())["counts"]
        assert found["ended failed"] == found["taken over"] >= 1  # as often as the dead one was chosen
        await c.replicas[1].close()
        status, _, body = await p.post(url, CHAT)
        assert (status, json.loads(body)["error"]["code"]) == (502, "no_replica")


async def test_a_request_is_held_for_longer_than_envoy_waits_for_messages(
    c: Cluster, tokenizer: Path, tmp_path: Path
) -> None:
    async with through_envoy(c, tokenizer, tmp_path, {"message_timeout_s": 0.2}) as (p, url):
        may_go_on = held_router(c)
        asked = asyncio.create_task(p.post(url, CHAT))
        await asyncio.sleep(1.0)
        assert not asked.done()
        may_go_on.set()
        assert (await asked)[0] == 200


@pytest.mark.parametrize("fails_open", [False, True])
async def test_a_picker_that_is_killed_under_load(
    c: Cluster, tokenizer: Path, tmp_path: Path, fails_open: bool
) -> None:
    """Nothing is answered wrongly, and it is asked again when there is one again. Told to fail open, Envoy 1.40 lets
    through what has no body alone: of a body it has sent a piece to the picker, and keeps no copy."""
    port = free_port()
    command = [
        sys.executable, "-m", "router.picker", "--port", str(port), "--plaintext", "--router", c.router.endpoint,
        "--model-name", MODEL, "--tokenizer", str(tokenizer), "--notice", "0",
    ]  # fmt: skip
    with contextlib.ExitStack() as stack:

        def start() -> subprocess.Popen[str]:
            made = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
            stack.callback(made.wait, DEADLINE_S)
            stack.callback(made.kill)
            assert made.stderr is not None
            stack.callback(made.stderr.close)
            assert any(READY in line for line in iter(made.stderr.readline, ""))
            return made

        picker = await asyncio.to_thread(start)
        ports = [int(one.url.rpartition(":")[2]) for one in c.replicas]
        url = stack.enter_context(envoy_started(ports, port, tmp_path, fails_open=fails_open))

        async def status() -> int:
            try:
                async with c.http.post(url + CHAT_PATH, json=CHAT) as response:
                    await response.read()
                    return response.status
            except aiohttp.ClientError:
                return 0

        async def serves() -> bool:
            return await status() == 200

        await eventually(serves, "Envoy serves")
        loading = [asyncio.create_task(_again(status)) for _ in range(8)]
        await asyncio.sleep(0.3)
        picker.send_signal(signal.SIGKILL)
        await asyncio.sleep(0.3)
        for task in loading:
            task.cancel()
        found = [await one for one in loading]
        assert all(one in (200, 0, 500, 502, 503, 504) for each in found for one in each)
        before = (await c.state())["counts"]["arrived"]
        assert [await status() for _ in range(4)] == [500] * 4
        async with c.http.get(f"{url}/v1/models") as models:
            assert models.status == (200 if fails_open else 500)
        assert (await c.state())["counts"]["arrived"] == before
        await asyncio.to_thread(start)
        await eventually(serves, "it serves again")

        async def is_counted() -> bool:
            await status()
            return (await c.state())["counts"]["arrived"] > before

        await eventually(is_counted, "it counts again")


async def _again(ask: Any) -> list[int]:
    found = []
    try:
        while True:
            found.append(await ask())
    except asyncio.CancelledError:
        return found
