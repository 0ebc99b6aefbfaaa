"""Running requests are taken back for an urgent one, by SGLang's own scheduler: its first token comes earlier, streams
go on token for token, and the books balance."""

import asyncio
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import httpx
import pytest

from tests.overlay.test_charges import gained, idle, prompt
from tests.support.budget import is_night
from tests.support.live import Replica
from tests.support.waiting import wait_until

pytestmark = pytest.mark.engine

KV_TOKENS = 768
FLOOD, OUTPUT = 3, 200
"""So many requests fill the memory: SGLang keeps room for the whole output of those that ignore the end."""
STEP_S = 0.1
"""What a step takes at least, until the chat is answered: so a flood's answers take longer than it may."""

BEYOND = {"x-fair-tier": "1", "x-fair-slack-ms": "20000"}
"""What a gateway says of a flood: it is beyond its client's share."""
CHAT = {"x-fair-slack-ms": "3000"}


@dataclass
class Stream:
    """What came of one request, and when: the number of the event among all of the test."""

    ids: list[int] = field(default_factory=list)
    first: int = -1
    last: int = -1
    retractions: int = 0
    finish: str = ""
    rid: str = ""


@dataclass
class Watch:
    """Asks, and numbers what comes."""

    replica: Replica
    session: aiohttp.ClientSession
    events: int = 0

    async def ask(
        self,
        client: str,
        tokens: list[int],
        output_tokens: int,
        headers: dict[str, str],
        stream: Stream | None = None,
        **body: Any,
    ) -> Stream:
        stream = Stream() if stream is None else stream
        sampling = {"max_new_tokens": output_tokens, "ignore_eos": True, "temperature": 0}
        payload = {"input_ids": tokens, "sampling_params": sampling, "stream": True, **body}
        headers = {"x-fair-client": client, **headers}
        async with self.session.post(
            f"{self.replica.url}/generate", json=payload, headers=headers
        ) as response:
            async for line in response.content:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                stream.ids = event["output_ids"]
                stream.rid = event["meta_info"]["id"]
                stream.retractions = event["meta_info"].get("num_retractions", 0)
                stream.finish = (event["meta_info"].get("finish_reason") or {}).get("type", "")
                stream.last = self.events
                if stream.first < 0 and stream.ids:
                    stream.first = self.events
                self.events += 1
        return stream


@pytest.fixture(scope="module", params=["plain", "overlap"] if is_night() else ["overlap"])
def slo(request: pytest.FixtureRequest) -> Iterator[Replica]:
    engine = ("--disable-overlap-schedule",) if request.param == "plain" else ()
    with Replica(
        "--policy", "slo", "--quantum", "500", "--kv-tokens", str(KV_TOKENS), "--", *engine
    ) as replica:
        yield replica


def slow(replica: Replica, seconds: float | None) -> None:
    said = httpx.post(f"{replica.url}/slow_down", json={"forward_sleep_time": seconds}, timeout=30)
    assert said.status_code == 200


def prompts(seed: int, count: int, tokens: int = 20) -> list[list[int]]:
    rng = random.Random(seed)
    return [prompt(rng, tokens) for _ in range(count)]


async def chat_beside_a_flood(replica: Replica, seed: int) -> tuple[Stream, list[Stream]]:
    """The flood's answers are under way when the chat comes, and go on fast when it is answered."""
    slow(replica, STEP_S)
    async with aiohttp.ClientSession() as session:
        watch = Watch(replica, session)
        streams = [Stream() for _ in range(FLOOD + 1)]
        flood = [
            asyncio.create_task(watch.ask("flood", tokens, OUTPUT, BEYOND, stream))
            for tokens, stream in zip(prompts(seed, len(streams)), streams, strict=True)
        ]
        while sum(len(stream.ids) > 3 for stream in streams) < FLOOD:
            await asyncio.sleep(0.01)
        chat = await watch.ask("chat", prompts(seed + 1, 1, 150)[0], 5, CHAT)
        slow(replica, None)
        await asyncio.gather(*flood)
        return chat, streams


async def alone(replica: Replica, tokens: list[int], output_tokens: int) -> list[int]:
    async with aiohttp.ClientSession() as session:
        return (await Watch(replica, session).ask("alone", tokens, output_tokens, {})).ids


def test_a_chat_s_first_token_comes_before_any_answer_of_a_flood_has_ended(slo: Replica) -> None:
    slo.flush()
    before = idle(slo)
    chat, flood = asyncio.run(chat_beside_a_flood(slo, 1))
    after = idle(slo)
    assert chat.first < min(one.last for one in flood)
    assert sum(one.retractions for one in flood) == 1, "one of them was enough"
    assert after["evictions"] - before["evictions"] == 1
    assert all(one.finish == "length" for one in (chat, *flood))
    # The books: the server pays for what is computed again, which is what the cache has not.
    assert 0 < gained(before, after, "(system)", "extend_tokens") < 40
    assert gained(before, after, "flood", "extend_tokens") == 20 * len(flood)
    assert gained(before, after, "flood", "output_tokens") == OUTPUT * len(flood)
    assert f"\nsglang_fair_evictions_total {float(after['evictions'])}\n" in slo.metrics()
    back = next(one for one in flood if one.retractions)
    shown = httpx.get(f"{slo.url}/explain/{back.rid}", timeout=30).json()
    (told,) = shown["requests"][0]["evicted_for"]
    assert (told["same_client"], told["tier"]) == (False, 0)
    assert told["slack_s"] <= 3, "what the chat had left, which is less than nothing on a slow machine"
    for tokens, stream in zip(prompts(1, len(flood)), flood, strict=True):
        slo.flush()
        assert stream.ids == asyncio.run(alone(slo, tokens, OUTPUT)), f"{stream.retractions} times taken back"


async def _mixed(replica: Replica, seed: int) -> list[tuple[str, list[int], int, Stream]]:
    """A flood and a chat as above, then floods beyond their share, urgent and overdue chats; some are given up."""
    rng = random.Random(seed)
    async with aiohttp.ClientSession() as session:
        watch = Watch(replica, session)
        slow(replica, STEP_S)
        asked = [("a", tokens, OUTPUT, Stream()) for tokens in prompts(seed, FLOOD)]
        tasks = [
            asyncio.create_task(watch.ask(client, tokens, output, BEYOND, stream))
            for client, tokens, output, stream in asked
        ]
        while not all(len(stream.ids) > 3 for *_, stream in asked):
            await asyncio.sleep(0.01)
        await watch.ask("b", prompt(rng, 150), 5, CHAT)
        slow(replica, 0.01)
        for number in range(40):
            client = rng.choice("abc")
            tokens, output = prompt(rng, rng.choice([10, 60, 200])), rng.choice([5, 60, 300])
            says = BEYOND if client == "a" else {"x-fair-slack-ms": rng.choice(["1", "800", "3000"])}
            stream = Stream()
            asked.append((client, tokens, output, stream))
            rid = f"{seed:06}-{number:026}"
            tasks.append(asyncio.create_task(watch.ask(client, tokens, output, says, stream, rid=rid)))
            if rng.random() < 0.25:
                await asyncio.sleep(rng.choice([0.05, 0.4]))
                await session.post(
                    f"{replica.url}/abort_request", json={"rid": f"{seed:06}-{rng.randint(0, number):026}"}
                )
            await asyncio.sleep(rng.choice([0, 0.02, 0.1]))
        await asyncio.gather(*tasks)
        return asked


def test_books_balance_and_streams_are_whole_with_aborts_in_between(slo: Replica) -> None:
    slo.flush()
    before = idle(slo)
    asked = asyncio.run(_mixed(slo, 3))
    slow(slo, None)
    after = idle(slo)
    assert after["conservation"]["ok"], after["conservation"]
    assert after["corrections"] == 0
    assert after["evictions"] > before["evictions"]
    assert max(stream.retractions for *_, stream in asked) <= 3
    again = [one for one in asked if one[3].retractions and one[3].finish == "length"]
    assert again
    for _, tokens, output, stream in again[:6]:
        slo.flush()
        assert stream.ids == asyncio.run(alone(slo, tokens, output))
    wait_until(lambda: slo.fair()["totals"]["running"] == 0, "an idle replica")
