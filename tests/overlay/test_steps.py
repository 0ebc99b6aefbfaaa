"""The rule for steps inside SGLang's real scheduler: whoever runs is not stopped by whoever sends prompts."""

import asyncio
import json
import random
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest

from sglang_fair.core.steps import LEAST_SHARE
from tests.support import fork_server
from tests.support.budget import is_night
from tests.support.live import Answer, Replica
from tests.support.step_attack import DECODE_S, PREFILL_S, RUNNING, STEPS, VICTIMS

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def attacks() -> dict[str, Any]:
    ended = fork_server.run("-m", "tests.support.step_attack")
    assert ended.returncode == 0, ended.stderr[-3000:]
    return json.loads(ended.stdout.splitlines()[-1])


def test_without_a_trickle_every_step_is_a_token_for_all(attacks: dict[str, Any]) -> None:
    found = attacks["dlpm, without a trickle"]
    assert set(found["output"].values()) == {STEPS * RUNNING // VICTIMS}
    assert found["steps"]["held"] == 0


@pytest.mark.parametrize("policy", ["dlpm", "vtc"])
def test_those_who_run_keep_their_share_beside_a_trickle_of_prompts(
    attacks: dict[str, Any], policy: str
) -> None:
    """Of five clients each is entitled to a fifth of the time. What the trickle does not get is not lost."""
    found = attacks[policy]
    share = 1 / (VICTIMS + 1)
    assert share > LEAST_SHARE
    alone = found["seconds"] / DECODE_S * RUNNING / VICTIMS
    for output in found["output"].values():
        assert output >= 0.9 * share * alone
    assert found["trickle"] * PREFILL_S >= 0.5 * found["seconds"]
    assert found["steps"]["held"] > 0
    assert found["steps"]["largest_lag_s"] <= found["steps"]["bound_s"]
    assert found["conserved"]


@pytest.mark.parametrize("policy", ["dlpm", "vtc"])
def test_with_prompts_first_they_get_nothing(attacks: dict[str, Any], policy: str) -> None:
    """What the rule is for."""
    found = attacks[f"{policy}, prompts first"]
    assert set(found["output"].values()) == {0}
    assert found["trickle"] == STEPS
    assert found["steps"] is None


# ---- in the loop that a GPU has


STALL_MS = 1.0
"""So short that every step for prompts puts those that run behind, but for a mixed one, which also serves them."""

HEAVY = "runs 0"
"""Its share is nearly all of the time, so a mixed step serves it for less than it is due, however slow the machine."""


@pytest.fixture(scope="module", params=["alone", "mixed"] if is_night() else ["alone"])
def overlapping(request: pytest.FixtureRequest) -> Iterator[Replica]:
    """A real server whose loop forms a step before it has seen the last one's end; "mixed": steps of both kinds, as the
    session's `overlapping` has them."""
    mixed = ["--enable-mixed-chunk"] if request.param == "mixed" else []
    with Replica(
        "--policy", "dlpm", "--stall-ms", str(STALL_MS), "--kv-tokens", "8192",
        "--client-weights", json.dumps({HEAVY: 100}),
        "--", "--chunked-prefill-size", "256", *mixed, module="tests.support.odd_replica",
    ) as replica:  # fmt: skip
        yield replica


def test_prompts_that_are_cut_parked_aborted_and_left_end_no_scheduler(overlapping: Replica) -> None:
    """Two clients' long prompts and a third one's short ones beside three that run, until the rule for steps had
    something to do. What is not aborted or left is answered whole, nothing is kept in memory, and nobody was further
    behind than the bound."""
    for seed in range(ROUNDS):
        answers = asyncio.run(_cuts(overlapping, seed))
        assert {(answer.finish, answer.output_tokens) for answer in answers} == {("length", OUTPUT_TOKENS)}
        steps = overlapping.fair()["steps"]
        assert steps["stall_ms"] == STALL_MS
        assert steps["largest_lag_s"] <= steps["bound_s"]
        overlapping.flush()
        if steps["held"]:
            break
    assert steps["held"] > 0


def test_a_cut_prompt_that_stands_aside_for_another_one_loses_no_token(overlapping: Replica) -> None:
    """Prompts of many lengths are admitted between the chunks of long ones, which are answered as they are alone."""
    rng = random.Random(2)

    def prompt(tokens: int) -> list[int]:
        return [rng.randrange(250) for _ in range(tokens)]

    async def ask(session: aiohttp.ClientSession, client: str, tokens: list[int], output: int) -> list[int]:
        sampling = {"max_new_tokens": output, "ignore_eos": True, "temperature": 0}
        body = {"input_ids": tokens, "sampling_params": sampling}
        async with session.post(
            f"{overlapping.url}/generate", json=body, headers={"x-fair-client": client}
        ) as answer:
            assert answer.status == 200
            said = await answer.json()
        return list(said["output_ids"])

    async def scenario() -> None:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            stop = asyncio.Event()

            async def asks_on(client: str) -> None:
                while not stop.is_set():
                    await ask(session, client, prompt(rng.randrange(20, 256)), 4)

            others = [asyncio.create_task(asks_on(f"short {number}")) for number in range(4)]
            longs = [prompt(1000) for _ in range(12)]
            beside = [await ask(session, "long", tokens, 8) for tokens in longs]
            stop.set()
            await asyncio.gather(*others)
            await asyncio.to_thread(overlapping.flush)
            for tokens, found in zip(longs, beside, strict=True):
                assert await ask(session, "long", tokens, 8) == found

    asyncio.run(scenario())
    overlapping.flush()


OUTPUT_TOKENS = 60
ROUNDS = 10
"""A step that the machine held up for long would serve those that run for the rest of a round."""


async def _cuts(replica: Replica, seed: int) -> list[Answer]:
    """The answers of those that are neither aborted nor left. Prompts and ids are those of `seed` alone."""
    rng = random.Random(seed)

    def prompt(tokens: int) -> list[int]:
        return [rng.randrange(250) for _ in range(tokens)]

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True)) as session:

        async def ask(client: str, tokens: int, rounds: int) -> list[Answer]:
            return [
                await replica.ask(client, prompt(tokens), OUTPUT_TOKENS, session=session)
                for _ in range(rounds)
            ]

        async def leaves(client: str) -> list[Answer]:
            for number in range(6):
                await replica.ask(client, prompt(1500), session=session, leave_after_s=0.05 + 0.1 * number)
            return []

        async def is_aborted(client: str) -> list[Answer]:
            for number in range(6):
                rid = f"{seed} {client} {number}"
                asked = asyncio.create_task(replica.ask(client, prompt(1500), session=session, rid=rid))
                await asyncio.sleep(0.05 + 0.1 * number)
                async with session.post(f"{replica.url}/abort_request", json={"rid": rid}):
                    pass
                await asked
            return []

        found = await asyncio.gather(
            *(ask(f"runs {number}", 30, 4) for number in range(3)),
            *(ask(client, 1000, 2) for client in ("long 1", "long 2")),
            ask("short", 40, 4),
            *(wait(client) for wait in (leaves, is_aborted) for client in ("long 1", "long 2")),
        )
    return [answer for answers in found for answer in answers]
