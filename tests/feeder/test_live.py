"""Batches from the official client to their results, with real processes in front of stand-in replicas."""

import asyncio
import json
import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types import Batch

from tests.support.budget import is_night
from tests.support.postgres import Postgres, why_none
from tests.support.site import Process, Site
from tests.support.stand_in import MODEL, make_tokenizer
from tests.support.waiting import eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

FEEDER_KEY = "the feeder's own key"
OVER = ("completed", "failed", "expired", "cancelled")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


class Batches(Site):
    """A site whose gateway keeps batches, and feeders."""

    def __init__(self, tokenizer: Path, kept: tuple[str, ...], feeders: int = 1, **options: Any) -> None:
        super().__init__(tokenizer, gateway_options=kept, **options)
        self._clients: list[openai.AsyncOpenAI] = []
        self.feeders = [
            Process(f"feeder{index}", "router.feeder", *kept, "--gateway", self.gateway_urls[0])
            for index in range(feeders)
        ]

    async def start(self) -> None:
        await super().start()
        for one in self.feeders:
            one.start()

    async def __aexit__(self, kind: object, *more: object) -> None:
        for client in self._clients:
            await client.close()
        for one in self.feeders:
            if kind is not None and one.log.exists():
                print(f"--- {one.name}\n{one.log.read_text()[-3000:]}")
            one.close()
        await super().__aexit__(kind, *more)

    def client(self, name: str) -> openai.AsyncOpenAI:
        made = openai.AsyncOpenAI(
            api_key=name,
            base_url=f"{self.gateway_urls[0]}/v1",
            max_retries=5,
            default_headers={"x-fair-client": name},
        )
        self._clients.append(made)
        return made

    async def over(self, client: openai.AsyncOpenAI, batch: str, deadline_s: float = 120.0) -> Batch:
        """The batch, when it is over."""

        async def check() -> Batch | None:
            try:
                found = await client.batches.retrieve(batch)
            except (openai.APIConnectionError, openai.InternalServerError):  # gateway or database were killed
                return None
            return found if found.status in OVER else None

        found: Batch = await eventually(check, f"the end of batch {batch}", deadline_s)
        return found


def run(
    body: Callable[[Batches], Awaitable[None]], tokenizer: Path, tmp_path: Path, *kept: str, **more: Any
) -> None:
    async def main() -> None:
        async with Batches(tokenizer, kept or ("--batches", str(tmp_path / "kept")), **more) as site:
            await site.start()
            await body(site)

    asyncio.run(main())


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_FAIR_FEEDER_KEY", FEEDER_KEY)


def line(custom_id: str, prompt: Any, **body: Any) -> dict[str, Any]:
    return {
        "custom_id": custom_id,
        "method": "POST",
        "url": "/v1/completions",
        "body": {"model": MODEL, "prompt": prompt, "max_tokens": 4, "temperature": 0, **body},
    }


def jsonl(lines: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(one).encode() + b"\n" for one in lines)


async def created(client: openai.AsyncOpenAI, content: bytes, window: str = "24h") -> str:
    file = await client.files.create(file=("in.jsonl", content), purpose="batch")
    batch = await client.batches.create(
        input_file_id=file.id,
        endpoint="/v1/completions",
        completion_window=window,  # type: ignore[arg-type]
    )
    return batch.id


async def results(client: openai.AsyncOpenAI, file: str | None) -> list[dict[str, Any]]:
    if file is None:
        return []
    return [json.loads(one) for one in (await client.files.content(file)).text.splitlines()]


async def check(site: Batches, client: openai.AsyncOpenAI, name: str, count: int) -> None:
    """All was answered, each once."""
    found = await site.over(client, name, 240.0)
    assert found.status == "completed", found
    done = await results(client, found.output_file_id)
    assert [one["custom_id"] for one in done] == [f"id {index}" for index in range(count)]
    assert await results(client, found.error_file_id) == []
    for index in (0, count - 1):
        text = done[index]["response"]["body"]["choices"][0]["text"]
        assert text == site.expected("completions", f"p {index}", 4)


def test_a_batch_is_answered_as_its_requests_are(tokenizer: Path, tmp_path: Path) -> None:
    async def body(site: Batches) -> None:
        client = site.client("gold")
        lines = [line(f"id {index}", f"prompt {index}") for index in range(200)]
        found = await site.over(client, await created(client, jsonl(lines)))
        assert found.status == "completed", found
        assert found.request_counts is not None
        counts = found.request_counts
        assert (counts.total, counts.completed, counts.failed) == (200, 200, 0)
        done = {one["custom_id"]: one for one in await results(client, found.output_file_id)}
        assert len(done) == 200
        for index in (0, 1, 199):
            answer = done[f"id {index}"]["response"]
            assert answer["status_code"] == 200
            assert answer["body"]["choices"][0]["text"] == site.expected("completions", f"prompt {index}", 4)
            assert done[f"id {index}"]["error"] is None
        assert found.error_file_id is None

        async def is_told() -> bool:
            told = (await site.state())["batches"]
            return told["clients"] == {"gold": {"left": 0, "completed": 200, "failed": 0, "running": 0}}

        await eventually(is_told, "the gateway knows of the end")
        await site.quiet()

    run(body, tokenizer, tmp_path)


@pytest.mark.parametrize("seed", range(5 if is_night() else 1))
def test_each_item_has_one_result_whatever_dies(tokenizer: Path, tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)

    async def body(site: Batches) -> None:
        clients = [site.client(name) for name in ("gold", "silver")]
        count = 600
        names = [
            await created(client, jsonl([line(f"id {index}", f"p {index}") for index in range(count)]))
            for client in clients
        ]
        victims = [*site.feeders, site.gateways[0], site.router, *site.replicas.values()]
        for _ in range(6):
            await asyncio.sleep(rng.uniform(0.2, 1.2))
            victim = rng.choice(victims)
            victim.kill()
            await asyncio.sleep(rng.uniform(0.0, 0.4))
            victim.start()
        for client, name in zip(clients, names, strict=True):
            await check(site, client, name, count)

    run(body, tokenizer, tmp_path, step_s=0.01)


@pytest.mark.skipif(bool(why_none()), reason=why_none() or "")
def test_two_feeders_over_postgresql_lose_nothing(tokenizer: Path, tmp_path: Path) -> None:
    """One is killed and does not come back; the database loses its power in the middle."""

    async def body(site: Batches) -> None:
        clients, count = [site.client(name) for name in ("gold", "silver")], 600
        content = jsonl([line(f"id {index}", f"p {index}") for index in range(count)])
        names = [await created(client, content) for client in clients]

        async def half() -> bool:
            counts = (await clients[0].batches.retrieve(names[0])).request_counts
            return counts is not None and counts.completed > count / 4

        await eventually(half, "a quarter is done")
        site.feeders[0].kill()
        await asyncio.sleep(0.3)
        await asyncio.to_thread(server.stop)
        await asyncio.sleep(1.0)
        await asyncio.to_thread(server.start)
        for client, name in zip(clients, names, strict=True):
            await check(site, client, name, count)

    with Postgres() as server:
        kept = ("--batches", server.url, "--batch-files", str(tmp_path / "files"))
        run(body, tokenizer, tmp_path, *kept, feeders=2, step_s=0.01)
