"""Tenants on a whole cluster: an adversary with invented keys and forged headers gets the share of its one key."""

import httpx
import pytest

from sglang_fair.common.identity import ANONYMOUS
from sglang_fair.common.service_keys import bearer
from sglang_fair.tenants import keys
from tests.support.asking import LIMIT_S, Asking, shares
from tests.support.live import Cluster
from tests.whole.conftest import ADMIN, FLOODING

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("flooded")]

ALLOWED = {*FLOODING, "thrifty", ANONYMOUS, "(system)"}
"""SGLang asks itself, without a name, when it starts."""
BOTH = ("honest", "adversary")
CONNECTIONS = 40
"""Of each tenant, over both replicas: more than run at a time, so that some always wait."""
INVENTED = 50
TIMES_THE_BOUND = 8


@pytest.mark.timeout(2 * LIMIT_S)
def test_fifty_invented_keys_and_forged_headers_get_no_share(flooded: Cluster) -> None:
    forged = {"x-fair-client": "honest", "x-tenant-id": "somebody", "x-fair-weight": "99@9223372036854775807"}
    invented = [keys.new_key() for _ in range(INVENTED)]
    before, seen = flooded.status()["gateway"]["ignored headers"], set[str]()
    with Asking(flooded.url, prompt_tokens=48, output_tokens=16) as asking:
        asking.ask("honest", CONNECTIONS)
        asking.ask("adversary", CONNECTIONS, forged)
        for key in invented:
            asking.ask(key, 1, forged)
        got = shares(flooded, BOTH, TIMES_THE_BOUND, lambda book: seen.update(book["clients"]))
    assert seen <= ALLOWED
    assert asking.statuses("honest") == asking.statuses("adversary") == {200}
    assert all(asking.statuses(key) == {401} for key in invented)
    assert got["honest"] / got["adversary"] == pytest.approx(1, rel=0.2), got
    after = flooded.status()["gateway"]["ignored headers"]
    sent = asking.answered["adversary", 200] + sum(asking.answered[key, 401] for key in invented)
    for header in forged:
        assert after.get(header, 0) - before.get(header, 0) == sent


def test_replicas_answer_whoever_has_their_key(flooded: Cluster) -> None:
    for url in flooded.addresses["replicas"]:
        for key, status in (("honest", 401), (ADMIN, 401), ("the replicas' key", 200)):
            assert httpx.get(f"{url}/fair", headers=bearer(key), timeout=30).status_code == status
        weights = {"client_weights": {"adversary": 9}}
        answer = httpx.post(f"{url}/fair", json=weights, headers=bearer("adversary"), timeout=30)
        assert answer.status_code == 401
        body = {"text": "x", "sampling_params": {"max_new_tokens": 1}}
        assert httpx.post(f"{url}/generate", json=body, timeout=30).status_code == 401


def test_the_longest_answer_is_what_the_engine_makes(flooded: Cluster) -> None:
    """By the engine's own count, for requests that name no limit."""
    requests = {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], "ignore_eos": True},
        "/v1/completions": {"prompt": "x", "ignore_eos": True},
        "/generate": {"text": "x", "sampling_params": {"ignore_eos": True}},
    }
    for path, body in requests.items():
        answer = httpx.post(flooded.url + path, json=body, headers=bearer("thrifty"), timeout=60).json()
        made = answer["usage"] if "usage" in answer else answer["meta_info"]
        assert made["completion_tokens"] == 4, path
