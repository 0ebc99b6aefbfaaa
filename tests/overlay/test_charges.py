"""Charges reach the client that a request names. That they are what the engine computes: `tests.support.loops`."""

import random
from typing import Any

import httpx
import pytest

from tests.support.live import Replica
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


ENDPOINTS: dict[str, dict[str, Any]] = {
    "/generate": {"text": "hello there", "sampling_params": {"max_new_tokens": 4, "ignore_eos": True}},
    "/v1/completions": {"model": "tiny", "prompt": "hello there", "max_tokens": 4, "ignore_eos": True},
    "/v1/chat/completions": {
        "model": "tiny",
        "messages": [{"role": "user", "content": "hello there"}],
        "max_tokens": 4,
        "ignore_eos": True,
    },
}
"""Each with a body that asks for four tokens."""


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body"), ENDPOINTS.items())
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
