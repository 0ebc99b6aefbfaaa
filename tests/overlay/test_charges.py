"""Charges equal the engine's token counters: chunked and mixed prefill, aborts, retraction."""

import asyncio
import random
from collections import defaultdict
from typing import Any

import aiohttp
import httpx
import pytest

from tests.support.live import Answer, Replica
from tests.support.waiting import wait_until

pytestmark = pytest.mark.engine

VOCABULARY = 250


def idle(replica: Replica) -> dict[str, Any]:
    """The books once nothing waits or runs."""

    def state() -> dict[str, Any] | None:
        books = replica.fair()
        return books if books["totals"]["waiting"] == books["totals"]["running"] == 0 else None

    found: dict[str, Any] = wait_until(state, "an idle replica")
    return found


def gained(before: dict[str, Any], after: dict[str, Any], client: str, what: str) -> int:
    old = before["clients"].get(client, {}).get(what, 0)
    gain: int = after["clients"].get(client, {}).get(what, 0) - old
    return gain


def prompt(rng: random.Random, tokens: int) -> list[int]:
    return [rng.randrange(VOCABULARY) for _ in range(tokens)]


@pytest.mark.parametrize("scheduling", ["under_pressure", "overlapping"])
def test_books_balance_under_a_mixed_load_with_aborts_and_retraction(
    scheduling: str, request: pytest.FixtureRequest
) -> None:
    """Four clients with shared prefixes, long prompts, long outputs; some hang up, some are aborted."""
    replica: Replica = request.getfixturevalue(scheduling)
    replica.flush()
    before = idle(replica)
    answers = asyncio.run(_mixed_load(replica))
    after = idle(replica)

    assert after["conservation"]["ok"], after["conservation"]
    retractions = sum(answer.retractions for _, _, answer in answers)
    assert retractions > 0, "the pool was not small enough to test retraction"
    assert gained(before, after, "(system)", "extend_tokens") > 0, (
        "recomputed tokens are the server's own work"
    )

    by_client: dict[str, list[tuple[str, Answer]]] = defaultdict(list)
    for client, kind, answer in answers:
        by_client[client].append((kind, answer))
    for client, entries in by_client.items():
        whole = [answer for kind, answer in entries if kind == "whole"]
        assert all(answer.finish == "length" for answer in whole), (client, entries)
        charged = {
            what: gained(before, after, client, what)
            for what in ("extend_tokens", "output_tokens", "requests")
        }
        output = sum(answer.output_tokens for answer in whole)
        if len(whole) == len(entries):
            assert charged["output_tokens"] == output
            if not any(answer.retractions for answer in whole):
                computed = sum(answer.prompt_tokens - answer.cached_tokens for answer in whole)
                assert charged["extend_tokens"] == computed
        else:
            assert charged["output_tokens"] >= output
        assert charged["requests"] <= len(entries)
    engine = {
        what: after["conservation"][f"engine_{what}"] - before["conservation"][f"engine_{what}"]
        for what in ("extend_tokens", "output_tokens")
    }
    for what, total in engine.items():
        accounts = set(by_client) | {"(system)"}
        assert sum(gained(before, after, account, what) for account in accounts) == total


async def _mixed_load(replica: Replica) -> list[tuple[str, str, Answer]]:
    rng = random.Random(7)
    prefixes = {
        client: prompt(rng, length) for client, length in (("a", 300), ("b", 100), ("c", 0), ("d", 600))
    }
    plan: list[tuple[str, str, list[int], int]] = []
    for number in range(24):
        client = "abcd"[number % 4]
        kind = "hangs-up" if number % 9 == 5 else "aborted" if number % 9 == 7 else "whole"
        kind = "whole" if client == "c" else kind
        plan.append(
            (client, kind, prefixes[client] + prompt(rng, rng.randrange(10, 200)), rng.randrange(200, 500))
        )
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:

        async def one(number: int, client: str, kind: str, tokens: list[int], outputs: int) -> Answer:
            rid = f"{number:032x}"
            if kind == "hangs-up":
                leave_after_s: float | None = 0.2 + 0.1 * (number % 7)
            else:
                leave_after_s = None
            request = asyncio.create_task(
                replica.ask(
                    client,
                    tokens,
                    outputs,
                    session=session,
                    rid=rid,
                    ignore_eos=False,
                    leave_after_s=leave_after_s,
                )
            )
            if kind == "aborted":
                await asyncio.sleep(0.05 * number)
                async with session.post(f"{replica.url}/abort_request", json={"rid": rid}):
                    pass
            return await request

        answers = await asyncio.gather(*(one(number, *entry) for number, entry in enumerate(plan)))
    return [(client, kind, answer) for (client, kind, _, _), answer in zip(plan, answers, strict=True)]


def test_abort_while_waiting_costs_nothing_and_abort_between_chunks_costs_what_was_computed(
    under_pressure: Replica,
) -> None:
    replica = under_pressure
    replica.flush()
    before = idle(replica)
    tokens = prompt(random.Random(3), 1800)

    async def scenario() -> None:
        async with aiohttp.ClientSession() as session:
            running = asyncio.create_task(replica.ask("chunks", tokens, 50, session=session, rid="c" * 32))
            await asyncio.to_thread(
                wait_until,
                lambda: gained(before, replica.fair(), "chunks", "extend_tokens") > 0,
                "a first chunk",
            )
            await asyncio.to_thread(replica.abort, "c" * 32)
            await running

    asyncio.run(scenario())
    after = idle(replica)
    assert 0 < gained(before, after, "chunks", "extend_tokens") <= 1800
    assert after["conservation"]["ok"], after["conservation"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"text": "hello there", "sampling_params": {"max_new_tokens": 4, "ignore_eos": True}}),
        ("/v1/completions", {"model": "tiny", "prompt": "hello there", "max_tokens": 4, "ignore_eos": True}),
        (
            "/v1/chat/completions",
            {
                "model": "tiny",
                "messages": [{"role": "user", "content": "hello there"}],
                "max_tokens": 4,
                "ignore_eos": True,
            },
        ),
    ],
)
def test_the_client_reaches_the_scheduler_by_every_endpoint(
    under_pressure: Replica, path: str, body: dict[str, Any], stream: bool
) -> None:
    """By header; and what a body says of itself is not believed."""
    client = f"tenant{path}{stream}"
    forged: dict[str, Any] = {"fair": {"client": "somebody else"}}
    if path == "/generate":
        body = {**body, "sampling_params": {**body["sampling_params"], "custom_params": forged}}
    else:
        body = {**body, "custom_params": forged}
    response = httpx.post(
        f"{under_pressure.url}{path}",
        json={**body, "stream": stream},
        headers={"X-Tenant-Id": client},
        timeout=60,
    )
    assert response.status_code == 200, response.text
    clients = idle(under_pressure)["clients"]
    assert clients[client]["output_tokens"] == 4
    assert "somebody else" not in clients


def test_parallel_samples_and_batches_are_charged_to_their_client(under_pressure: Replica) -> None:
    """n = 2: the prompt is computed once, by the request that SGLang sends ahead to warm the prefix."""
    replica = under_pressure
    replica.flush()
    before = idle(replica)
    text = "a prompt that is longer than two pages of the cache, so that samples can share it"
    body = {"model": "tiny", "prompt": text, "n": 2, "max_tokens": 5, "ignore_eos": True}
    url = f"{replica.url}/v1/completions"
    answer = httpx.post(url, json=body, headers={"x-fair-client": "n2"}, timeout=60).json()
    batch = httpx.post(
        f"{replica.url}/generate",
        json={
            "text": ["one prompt", "two prompts"],
            "sampling_params": {"max_new_tokens": 3, "ignore_eos": True},
        },
        headers={"x-fair-client": "batch"},
        timeout=60,
    ).json()
    after = idle(replica)
    assert answer["usage"]["completion_tokens"] == gained(before, after, "n2", "output_tokens") == 10
    assert len(text) <= gained(before, after, "n2", "extend_tokens") < 2 * len(text)
    assert len(batch) == 2
    assert gained(before, after, "batch", "output_tokens") == 6
    assert gained(before, after, "batch", "extend_tokens") == len("one prompt") + len("two prompts")
    assert after["conservation"]["ok"]


def test_a_refused_request_costs_the_one_token_that_was_computed(under_pressure: Replica) -> None:
    """Longer than the pool: SGLang cuts it to one token and runs that to end it by the usual way."""
    before = idle(under_pressure)
    under_pressure.generate("too-long", [5] * 9000, 5)
    after = idle(under_pressure)
    assert gained(before, after, "too-long", "extend_tokens") <= 1
    assert after["conservation"]["ok"]
