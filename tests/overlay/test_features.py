"""Charges are exact whatever SGLang does with a request: each feature alone, on the real scheduler."""

import random

import httpx
import pytest

from tests.overlay.test_charges import gained, idle, prompt
from tests.support.live import Answer, Replica

pytestmark = pytest.mark.engine


def computed(*answers: Answer) -> int:
    """Prompt tokens that the client was told were computed for it."""
    return sum(answer.prompt_tokens - answer.cached_tokens for answer in answers)


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
        request = SimpleNamespace(rid="1", origin_input_ids=[1, 2], output_ids=[], sampling_params=sampling)
        job = job_of(request, Apps(), 0.0)
        assert (job.client, job.call, job.system_tokens) == ("me", call, system_tokens)
        assert (job.expected_output_tokens, job.unblocks) == (250, 3)
