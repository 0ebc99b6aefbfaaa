"""Charges are exact whatever SGLang does with a request: each feature alone, on the real scheduler."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import httpx
import pytest

from tests.overlay.test_charges import gained, idle, prompt
from tests.support.live import Answer, Replica
from tests.support.waiting import wait_until

pytestmark = pytest.mark.engine

Scenario = Callable[[aiohttp.ClientSession], Awaitable[Any]]


def run(scenario: Scenario) -> Any:
    async def inside() -> Any:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            return await scenario(session)

    return asyncio.run(inside())


async def until(replica: Replica, what: str, count: int) -> None:
    await asyncio.to_thread(wait_until, lambda: replica.fair()["totals"][what] == count, f"{count} {what}")


def computed(*answers: Answer) -> int:
    """Prompt tokens that the client was told were computed for it."""
    return sum(answer.prompt_tokens - answer.cached_tokens for answer in answers)


class TestCache:
    def test_a_prefix_that_vanishes_while_its_request_waits_is_paid(self, under_pressure: Replica) -> None:
        """It was in the cache when the request was looked up; a prompt of its client, which fills the pool and is
        computed first, pushes it out."""
        replica, rng = under_pressure, random.Random(22)
        replica.flush()
        tokens = prompt(rng, 160)
        replica.generate("owner", tokens)
        assert replica.generate("owner", [*tokens, 1]).cached_tokens == 160
        before = idle(replica)

        async def scenario(session: aiohttp.ClientSession) -> tuple[Answer, Answer]:
            fills = asyncio.create_task(replica.ask("filler", prompt(rng, 1900), 100, session=session))
            await asyncio.to_thread(
                wait_until, lambda: gained(before, replica.fair(), "filler", "extend_tokens") > 0, "a chunk"
            )
            waits = asyncio.create_task(replica.ask("filler", [*tokens, 2], session=session))
            return await fills, await waits

        filler, waiter = run(scenario)
        after = idle(replica)
        assert filler.finish == "length"
        assert waiter.cached_tokens == 0
        assert computed(filler) == 1900
        assert gained(before, after, "filler", "extend_tokens") == 1900 + 161
        assert gained(before, after, "filler", "cached_tokens") == 0

    def test_a_new_prefix_that_many_share_is_computed_and_paid_once(self, under_pressure: Replica) -> None:
        """Six come at once; those whose prefix is being computed wait for it, and find it in the cache."""
        replica, rng = under_pressure, random.Random(23)
        replica.flush()
        shared, own = prompt(rng, 320), [prompt(rng, 20) for _ in range(6)]
        before = idle(replica)

        async def scenario(session: aiohttp.ClientSession) -> list[Answer]:
            return await asyncio.gather(
                *(
                    replica.ask(f"sharer{number}", [*shared, *rest], 2, session=session)
                    for number, rest in enumerate(own)
                )
            )

        answers = run(scenario)
        after = idle(replica)
        paid = [gained(before, after, f"sharer{number}", "extend_tokens") for number in range(6)]
        assert paid == [computed(answer) for answer in answers]
        assert sum(paid) < 2 * 320, "not even twice"
        assert sum(paid) >= 320 + 6 * 20


class TestEnds:
    def test_a_client_that_hangs_up_is_charged_what_was_made_and_no_more(
        self, one_at_a_time: Replica
    ) -> None:
        replica = one_at_a_time
        before = idle(replica)
        seen = run(
            lambda session: replica.ask("left", [4] * 20, 20_000, session=session, leave_after_tokens=10)
        )
        after = idle(replica)
        charged = gained(before, after, "left", "output_tokens")
        assert 10 <= seen.output_tokens <= charged < 20_000
        assert replica.fair()["clients"]["left"] == after["clients"]["left"]

    def test_under_overlap_scheduling_the_step_past_the_end_is_nobodys(self, overlapping: Replica) -> None:
        """The engine has begun the next step when it learns that an answer has ended."""
        assert (
            httpx.get(f"{overlapping.url}/server_info", timeout=30).json()["disable_overlap_schedule"]
            is False
        )
        before = idle(overlapping)
        answers = [overlapping.generate("a", [6] * 20, outputs) for outputs in (1, 2, 37)]
        after = idle(overlapping)
        assert gained(before, after, "a", "output_tokens") == 1 + 2 + 37
        assert gained(before, after, "a", "extend_tokens") == computed(*answers)
        assert gained(before, after, "(system)", "output_tokens") == 0


class TestOtherRequests:
    def test_a_session_pays_each_turn_for_what_is_not_in_the_cache(self, under_pressure: Replica) -> None:
        """A turn brings its own tokens; SGLang puts the ones before, answers included, in front of them.

        (No other test uses these ids: for two seconds SGLang may abort whoever comes with the same one again.)
        """
        replica, rng = under_pressure, random.Random(31)
        replica.flush()
        before = idle(replica)
        session = httpx.post(
            f"{replica.url}/open_session", json={"capacity_of_str_len": 10_000}, timeout=30
        ).json()
        answers, turn = [], None
        for number, size in enumerate((100, 30, 50)):
            rid = f"5e{number:030x}"
            answers.append(
                replica.generate(
                    "talker", prompt(rng, size), 8, rid=rid, session_params={"id": session, "rid": turn}
                )
            )
            turn = rid
        assert (
            httpx.post(f"{replica.url}/close_session", json={"session_id": session}, timeout=30).status_code
            == 200
        )
        after = idle(replica)
        assert [answer.prompt_tokens for answer in answers] == [100, 100 + 8 + 30, 138 + 8 + 50]
        assert gained(before, after, "talker", "extend_tokens") == computed(*answers) < 100 + 138 + 196
        assert gained(before, after, "talker", "output_tokens") == 3 * 8

    def test_scores_pay_for_their_prompts_and_put_nothing_out(self, under_pressure: Replica) -> None:
        before = idle(under_pressure)
        body = {
            "model": "tiny",
            "query": "is it so? ",
            "items": ["yes", "certainly"],
            "label_token_ids": [5, 6],
        }
        answer = httpx.post(
            f"{under_pressure.url}/v1/score", json=body, headers={"x-fair-client": "judge"}, timeout=60
        )
        assert answer.status_code == 200, answer.text
        after = idle(under_pressure)
        tokens = gained(before, after, "judge", "extend_tokens") + gained(
            before, after, "judge", "cached_tokens"
        )
        assert tokens == len("is it so? yes") + len("is it so? certainly")
        assert gained(before, after, "judge", "output_tokens") == 0
        assert gained(before, after, "judge", "requests") == 2

    def test_input_log_probabilities_are_computed_and_paid(self, under_pressure: Replica) -> None:
        """They need the whole prompt again, however much of it is in the cache."""
        replica, tokens = under_pressure, prompt(random.Random(33), 150)
        replica.generate("curious", tokens)
        before = idle(replica)
        answer = replica.generate("curious", tokens, 2, return_logprob=True, logprob_start_len=0)
        after = idle(replica)
        assert gained(before, after, "curious", "extend_tokens") == computed(answer) == 150
        assert gained(before, after, "curious", "output_tokens") == 2

    def test_a_health_check_is_the_servers_own(self, under_pressure: Replica) -> None:
        """Its id is no proof: `odd_requests`."""
        replica = under_pressure
        between = idle(replica)
        answer = httpx.get(f"{replica.url}/health_generate", headers={"x-fair-client": "probe"}, timeout=60)
        assert answer.status_code == 200, answer.text
        after = idle(replica)
        assert gained(between, after, "(system)", "requests") == 1
        assert "probe" not in after["clients"]


class TestAnnouncements:
    @pytest.mark.usefixtures("sglang")
    @pytest.mark.parametrize(
        ("client", "said", "call", "system_tokens"),
        [
            ({"x-fair-client": "me"}, ("2", "1"), 2, 1),
            ({"x-fair-client": "me"}, ("0", "100000"), 0, 2),
            ({"x-fair-client": "me"}, ("-1", "1e9"), 0, 0),
            ({"x-tenant-id": "me"}, ("2", "1"), 0, 0),
        ],
        ids=["as said", "no more than the prompt", "no numbers", "not from the gateway"],
    )
    def test_announcements_reach_the_policy_and_what_the_gateway_has_counted_is_believed(
        self, client: dict[str, str], said: tuple[str, str], call: int, system_tokens: int
    ) -> None:
        from types import SimpleNamespace

        from sglang_fair.common.interaction import Apps
        from sglang_fair.overlay.identity import carry_client, job_of

        obj = SimpleNamespace(sampling_params={"custom_params": {"fair": {"unblocks": 99}, "mine": 1}})
        headers = client | dict(zip(("x-fair-call", "x-fair-system-tokens"), said, strict=True))
        headers |= {"x-fair-expected-output-tokens": "250", "x-fair-unblocks": "3"}
        carry_client(obj, SimpleNamespace(headers=headers, scope={}))
        assert obj.sampling_params["custom_params"]["mine"] == 1
        sampling = SimpleNamespace(**obj.sampling_params, max_new_tokens=9)
        job = job_of(SimpleNamespace(rid="1", origin_input_ids=[1, 2], sampling_params=sampling), Apps())
        assert (job.client, job.call, job.system_tokens) == ("me", call, system_tokens)
        assert (job.expected_output_tokens, job.unblocks) == (250, 3)
