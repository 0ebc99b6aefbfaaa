"""A request that the policy refuses ends with 429 and the policy's words; one that it delays runs in time."""

import json
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from tests.overlay.test_charges import ENDPOINTS, gained, idle
from tests.support.live import Replica

pytestmark = pytest.mark.engine

SAID = "has used up its 2 requests per minute"


@pytest.fixture(scope="module")
def hasty() -> Iterator[Replica]:
    """An embedding model under a limit of one request in half a second; what is more, waits."""
    with Replica(
        "--policy", "hasty", "--policy-options", "excess=delay,limit=1", "--client-weights", '{"free": 1000}',
        "--", "--is-embedding", "--chunked-prefill-size", "64", module="tests.support.odd_replica",
    ) as replica:  # fmt: skip
        yield replica


def post(replica: Replica, path: str, body: dict[str, Any], client: str) -> httpx.Response:
    return httpx.post(f"{replica.url}{path}", json=body, headers={"x-fair-client": client}, timeout=60)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body"), ENDPOINTS.items())
def test_one_too_many_is_refused_and_leaves_nothing_behind(
    overlapping: Replica, path: str, body: dict[str, Any], stream: bool
) -> None:
    client = f"limited{path}{stream}"
    for _ in range(2):
        answer = post(overlapping, path, {**body, "stream": stream}, client)
        assert answer.status_code == 200, answer.text
        assert not stream or answer.text.rstrip().endswith("[DONE]")
    before = idle(overlapping)
    answers = [post(overlapping, path, {**body, "stream": stream}, client)]
    if path != "/generate":
        answers.append(post(overlapping, path, {**body, "stream": stream, "n": 2}, client))
    for answer in answers:
        assert answer.status_code == 429, answer.text
        assert f"client '{client}' {SAID}" in json.dumps(answer.json())
    after = idle(overlapping)
    assert after["refused"] > before["refused"]
    for what in ("requests", "extend_tokens", "cached_tokens", "output_tokens", "service"):
        assert gained(before, after, client, what) == 0
    assert gained(before, after, "(system)", "extend_tokens") == 0
    overlapping.flush()  # which only an engine that holds nothing does


@pytest.mark.parametrize(
    ("path", "odd", "field"),
    [
        ("/generate", {"rid": []}, "rid"), ("/generate", {"input_ids": [1 << 30], "text": None}, "input_ids"),
        ("/generate", {"conversation_id": "x"}, "conversation_id"), ("/v1/completions", {"top_k": 1 << 40}, "top_k"),
        ("/v1/completions", {"prompt": [5, 1 << 20]}, "prompt"), ("/v1/chat/completions", {"n": 0}, "n"),
    ],
)  # fmt: skip
def test_what_a_gateway_refuses_a_replica_refuses(
    overlapping: Replica, path: str, odd: dict[str, Any], field: str
) -> None:
    answer = post(overlapping, path, {**ENDPOINTS[path], **odd}, "odd")
    assert answer.status_code == 400, answer.text
    assert f"`{field}`" in answer.text


def test_what_sglang_refuses_itself_keeps_its_own_words(overlapping: Replica) -> None:
    for _ in range(2):
        assert post(overlapping, "/generate", ENDPOINTS["/generate"], "clumsy").status_code == 200
    nowhere = {**ENDPOINTS["/generate"], "session_params": {"id": "nowhere"}}
    answer = post(overlapping, "/generate", nowhere, "clumsy")
    assert answer.status_code == 400
    assert "session id nowhere does not exist" in answer.text


def test_a_delayed_request_runs_when_it_may_in_an_engine_that_has_nothing_else(hasty: Replica) -> None:
    """Embeddings: their prompts are charged, in chunks too, and they put out nothing."""
    before = idle(hasty)
    begun_s = time.monotonic()
    for _ in range(3):
        answer = post(hasty, "/v1/embeddings", {"model": "tiny", "input": "x" * 100}, "slow")
        assert answer.status_code == 200, answer.text
    assert time.monotonic() - begun_s > 0.9, "the third comes two windows after the first"
    answer = post(hasty, "/v1/embeddings", {"model": "tiny", "input": ["y" * 70, "z" * 7]}, "free")
    assert answer.status_code == 200, answer.text
    after = idle(hasty)
    assert gained(before, after, "slow", "requests") == 3
    computed = gained(before, after, "slow", "extend_tokens")
    assert computed + gained(before, after, "slow", "cached_tokens") == 3 * 100
    assert gained(before, after, "free", "extend_tokens") == 77
    assert after["totals"]["output_tokens"] == 0
    assert after["conservation"]["checks"] > before["conservation"]["checks"]
    assert after["refused"] == 0


@pytest.mark.usefixtures("sglang")
def test_a_request_that_comes_back_from_the_batch_is_not_refused() -> None:
    from sglang_fair.overlay.config import Config
    from sglang_fair.overlay.replica import ReplicaFairness

    def request(rid: str) -> Any:
        sampling = SimpleNamespace(custom_params={"fair": {"client": "a"}}, max_new_tokens=3)
        return SimpleNamespace(
            rid=rid, origin_input_ids=[1, 2], output_ids=[], sampling_params=sampling, to_finish=None,
            seqlen=2, num_matched_prefix_tokens=0,
        )  # fmt: skip

    cache = SimpleNamespace(disable=True)
    fair = ReplicaFairness(Config(policy_options="limit=1"), "rpm", orders=True, tree_cache=cache)
    first = request("first")
    assert fair.refuses(first) is None
    fair.arrive(first)
    assert fair.refuses(first) is None
    assert "has used up its 1 requests" in str(fair.refuses(request("first"))), "another one with its id"
    assert "has used up its 1 requests" in str(fair.refuses(request("second")))
    assert fair.refuses(SimpleNamespace(**{**vars(request("third")), "to_finish": "too long"})) is None
