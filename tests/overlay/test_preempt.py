"""Running requests are taken back for an urgent one, by SGLang's own scheduler: its first token comes earlier, streams
go on token for token, and the books balance."""

import asyncio
import random
from collections.abc import Iterator

import httpx
import pytest

from tests.overlay.test_charges import gained, idle, prompt
from tests.support.budget import is_night
from tests.support.live import Answer, Replica

pytestmark = pytest.mark.engine

KV_TOKENS = 768
FLOOD, OUTPUT = 3, 200
"""So many requests fill the memory: SGLang keeps room for the whole output of those that ignore the end."""
STEP_S = 0.1
"""What a step takes at least, until the chat is answered: so a flood's answers take longer than it may."""

BEYOND = {"x-fair-tier": "1", "x-fair-slack-ms": "20000"}
"""What a gateway says of a flood: it is beyond its client's share."""
CHAT = {"x-fair-slack-ms": "3000"}


@pytest.fixture(scope="module", params=["plain", "overlap"] if is_night() else ["overlap"])
def slo(request: pytest.FixtureRequest) -> Iterator[Replica]:
    engine = ("--disable-overlap-schedule",) if request.param == "plain" else ()
    engine += ("--schedule-conservativeness", "2")  # before 0.5.22 it lets more run than there is room for
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


async def chat_beside_a_flood(replica: Replica, seed: int) -> tuple[Answer, list[Answer]]:
    """The flood's answers are under way when the chat comes, and go on fast when it is answered."""
    slow(replica, STEP_S)
    flood = [Answer() for _ in range(FLOOD + 1)]
    asked = [
        asyncio.create_task(replica.ask("flood", tokens, OUTPUT, headers=BEYOND, answer=answer))
        for tokens, answer in zip(prompts(seed, len(flood)), flood, strict=True)
    ]
    while sum(len(answer.ids) > 3 for answer in flood) < FLOOD:
        await asyncio.sleep(0.01)
    chat = await replica.ask("chat", prompts(seed + 1, 1, 150)[0], 5, headers=CHAT)
    slow(replica, None)
    await asyncio.gather(*asked)
    return chat, flood


def test_a_chat_s_first_token_comes_before_any_answer_of_a_flood_has_ended(slo: Replica) -> None:
    slo.flush()
    before = idle(slo)
    chat, flood = asyncio.run(chat_beside_a_flood(slo, 1))
    after = idle(slo)
    assert chat.first_at < min(one.finished_at for one in flood)
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
    for tokens, answer in zip(prompts(1, len(flood)), flood, strict=True):
        slo.flush()
        assert answer.ids == slo.generate("alone", tokens, OUTPUT).ids, (
            f"{answer.retractions} times taken back"
        )
