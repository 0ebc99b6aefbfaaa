"""Batches on a real cluster: the official client's thousand requests beside a chat, and kill -9 of any process."""

import asyncio
import contextlib
import json
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
from openai.types import Batch

from tests.support import checkpoints
from tests.support.budget import is_night
from tests.support.live import Cluster, lives
from tests.support.waiting import eventually

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

ITEMS = 1000 if is_night() else 200
PLACEMENTS = ("d2lpm-queue", "qlm") if is_night() else ("qlm",)
"""On a push with queues, agents and models that take turns: that is all that there is."""
TURNS = 2 if is_night() else 1
"""Of each kind. More than 4 may end the cluster: what dies five times, each within a minute of being ready, is not
started again."""
WAIT_S = 500.0


def client_of(cluster: Cluster, name: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        api_key=name, base_url=f"{cluster.url}/v1", max_retries=10, default_headers={"x-fair-client": name}
    )


def requests(count: int, tokens: int, models: tuple[str, ...] = ()) -> bytes:
    lines = [
        {
            "custom_id": f"id {index}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {
                **({"model": models[index % len(models)]} if models else {}),
                "messages": [{"role": "user", "content": f"Number {index}?"}],
                "max_tokens": tokens,
                "temperature": 0,
            },
        }
        for index in range(count)
    ]
    return b"".join(json.dumps(one).encode() + b"\n" for one in lines)


async def created(client: openai.AsyncOpenAI, content: bytes) -> str:
    file = await client.files.create(file=("in.jsonl", content), purpose="batch")
    batch = await client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    return batch.id


async def over(client: openai.AsyncOpenAI, name: str) -> Batch:
    async def check() -> Batch | None:
        with contextlib.suppress(openai.APIConnectionError, openai.APIStatusError):
            found = await client.batches.retrieve(name)
            return found if found.status in ("completed", "failed", "expired", "cancelled") else None
        return None

    found: Batch = await eventually(check, f"the end of batch {name}", WAIT_S)
    return found


async def check(client: openai.AsyncOpenAI, found: Batch, count: int) -> list[Any]:
    """Each request has one line of result, and it is an answer."""
    assert found.status == "completed", found
    assert found.output_file_id is not None
    assert found.error_file_id is None
    lines = (await client.files.content(found.output_file_id)).text.splitlines()
    results = [json.loads(line) for line in lines]
    assert [one["custom_id"] for one in results] == [f"id {index}" for index in range(count)]
    assert all(one["response"]["status_code"] == 200 for one in results)
    return results


def kinds(cluster: Cluster) -> Iterator[tuple[str, psutil.Process]]:
    """The processes of a cluster that a test may kill, by what they are."""
    ports = {int(url.rsplit(":", 1)[1]): f"replica {url}" for url in cluster.addresses["replicas"]}
    for one in psutil.Process(cluster.addresses["pids"]["cluster"]).children():
        with contextlib.suppress(psutil.Error):
            line = one.cmdline()
            for module in QUEUED:
                if module in line:
                    yield module, one
    for found in psutil.net_connections("tcp"):
        if found.status == psutil.CONN_LISTEN and found.laddr.port in ports and found.pid:
            yield ports[found.laddr.port], psutil.Process(found.pid)


def test_a_thousand_requests_beside_a_chat(tmp_path: Path) -> None:
    """The chat is answered while the batch is."""

    async def body(cluster: Cluster) -> None:
        batches, chats = client_of(cluster, "batch"), client_of(cluster, "chat")
        name = await created(batches, requests(ITEMS, 8))
        ending, answered = asyncio.create_task(over(batches, name)), 0
        while not ending.done():
            asked = [{"role": "user", "content": "And you?"}]
            await chats.chat.completions.create(model="default", max_tokens=8, messages=asked)
            answered += not ending.done()
        await check(batches, await ending, ITEMS)
        assert answered > 2
        for client in (batches, chats):
            await client.close()

    with Cluster("--batches", str(tmp_path / "kept")) as cluster:
        asyncio.run(body(cluster))


async def kill(cluster: Cluster, wanted: str, rng: random.Random) -> str:
    """One process of this kind ends; which. Of the replicas never the second before the first is back: then nothing."""
    found = [(kind, one) for kind, one in kinds(cluster) if kind.split()[0] == wanted]
    if wanted == "replica" and len(found) < 2:
        return ""
    if not found:  # it is being started again
        return ""
    kind, victim = rng.choice(found)
    with contextlib.suppress(ProcessLookupError):
        os.kill(victim.pid, signal.SIGKILL)
    await eventually(lambda: not lives(victim.pid), f"the end of {kind}")
    return kind


KINDS = ("router.feeder", "router.gateway", "router", "replica")
QUEUED = (*KINDS, "sglang_fair.agent")


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_each_item_has_one_result_whatever_is_killed(tmp_path: Path, placement: str) -> None:
    """Each kind has its turn, in any order, while items of two clients are answered."""
    rng = random.Random(11)
    models, options = (), ("--placement", placement)
    if placement == "qlm":
        models = ("a", "b")
        named = ",".join(
            f"{name}={checkpoints.write(tmp_path / name, seed)}" for seed, name in enumerate(models, 1)
        )
        options += ("--models", named, "--swap", "all", "--policy", "slo")

    async def body(cluster: Cluster) -> None:
        clients = [client_of(cluster, name) for name in ("gold", "silver")]
        size = ITEMS // 2
        names = [await created(one, requests(size, 4, models)) for one in clients]
        killed: list[str] = []
        for _ in range(TURNS):
            for wanted in rng.sample(QUEUED if models else KINDS, len(QUEUED if models else KINDS)):
                await asyncio.sleep(rng.uniform(0.2, 1.5))
                killed.append(await kill(cluster, wanted, rng))
        print("killed:", ", ".join(filter(None, killed)))
        for client, name in zip(clients, names, strict=True):
            results = await check(client, await over(client, name), size)
            for index, one in enumerate(results if models else ()):
                assert one["response"]["body"]["model"] == models[index % len(models)]
            await client.close()

    with Cluster("--batches", str(tmp_path / "kept"), *options) as cluster:
        asyncio.run(body(cluster))
