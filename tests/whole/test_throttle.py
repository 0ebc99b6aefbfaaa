"""A real cluster with --throttle oit: a flood, and an interaction beside it."""

import asyncio
import json
import random
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest

from tests.support.live import Cluster
from tests.support.waiting import wait_until

pytestmark = pytest.mark.e2e

LIMIT = 5
POOL_TOKENS = 2048


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    limits = tmp_path_factory.mktemp("limits") / "limits.json"
    limits.write_text(json.dumps({"user": LIMIT}))
    made = Cluster(
        "--policy", "wsc-dlpm", "--throttle", "oit", "--limits", str(limits), "--",
        "--max-total-tokens", str(POOL_TOKENS), "--max-running-requests", "4",
    )  # fmt: skip
    with made:
        yield made


async def ask(
    http: aiohttp.ClientSession, url: str, client: str, output: int = 4, **said: str
) -> dict[str, Any]:
    """One request of 200 tokens: its status, headers and body."""
    tokens = [random.randrange(250) for _ in range(200)]
    body = {"input_ids": tokens, "sampling_params": {"max_new_tokens": output, "ignore_eos": True}}
    headers = {"x-fair-client": client} | {f"x-fair-{key}": value for key, value in said.items()}
    async with http.post(f"{url}/generate", json=body, headers=headers) as answer:
        return {"status": answer.status, "headers": dict(answer.headers), "body": await answer.json()}


async def ask_on(http: aiohttp.ClientSession, url: str, client: str) -> None:
    """One request after the other, until it is cancelled: however fast the machine is, the flood lasts."""
    while True:
        answer = await ask(http, url, client, 300)
        if answer["status"] != 200:
            await asyncio.sleep(0.5)


async def refusal(http: aiohttp.ClientSession, url: str, client: str) -> dict[str, Any]:
    """The first answer that is one."""
    while (answer := await ask(http, url, client))["status"] == 200:
        pass
    return answer


def test_a_flood_is_throttled_and_an_interaction_beside_it_goes_on(cluster: Cluster) -> None:
    """By the load that real replicas publish."""

    async def scenario() -> tuple[list[dict[str, Any]], dict[str, Any]]:
        timeout = aiohttp.ClientTimeout(total=240)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as http:
            mine = [await ask(http, cluster.url, "light", interaction="i", app="agent", stage="plan")]
            flood = [asyncio.create_task(ask_on(http, cluster.url, "flood")) for _ in range(60)]
            await asyncio.to_thread(
                wait_until, lambda: cluster.status()["throttle"]["overloaded_for_s"] is not None, "overload"
            )
            more = await refusal(http, cluster.url, "flood")
            mine.append(await ask(http, cluster.url, "light", interaction="i", app="agent", stage="work"))
            for one in flood:
                one.cancel()
            await asyncio.gather(*flood, return_exceptions=True)
            return mine, more

    mine, more = asyncio.run(scenario())
    assert [one["status"] for one in mine] == [200] * 2
    assert more["status"] == 429
    assert more["body"]["error"]["code"] == "throttled_user"
    assert 1 <= int(more["headers"]["Retry-After"]) <= 60
