"""Tenants on a whole cluster: an adversary with invented keys and forged headers gets the share of its one key."""

import time
from collections.abc import Mapping
from typing import Any

import httpx
import pytest

from sglang_fair.common.identity import ANONYMOUS
from sglang_fair.common.service_keys import bearer
from sglang_fair.tenants import keys
from tests.support.asking import Asking
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
LIMIT_S = 400
"""For a busy machine; an idle one needs a tenth."""


class Shares:
    """Sums up service over the stretches in which both waited at a replica without a break. A stretch ends when one has
    nothing waiting, which happens now and then where a router holds requests. In each the difference must be inside
    the bound that the replica reports."""

    def __init__(self) -> None:
        self._begin: dict[str, tuple[float, int | None]] = {}
        self._before = self._stretch = dict.fromkeys(BOTH, 0.0)

    def see(self, book: Mapping[str, Any]) -> dict[str, float]:
        """A further GET /fair of the replica; what each got until now."""
        clients = book["clients"]
        now = {name: (clients[name]["service"], clients[name]["backlog"]) for name in BOTH if name in clients}
        if not self._begin or any(
            now.get(name, (0, None))[1] != begin[1] for name, begin in self._begin.items()
        ):
            self._before = self.got
            self._stretch = dict.fromkeys(BOTH, 0.0)
            waits = len(now) == len(BOTH) and all(backlog is not None for _, backlog in now.values())
            self._begin = now if waits else {}
        if self._begin:
            self._stretch = {name: now[name][0] - begin for name, (begin, _) in self._begin.items()}
            services = self._stretch.values()
            assert max(services) - min(services) <= book["bound"], (self._stretch, book["bound"])
        return self.got

    @property
    def got(self) -> dict[str, float]:
        return {name: before + self._stretch[name] for name, before in self._before.items()}


def shares(cluster: Cluster) -> dict[str, float]:
    """What both got at all replicas while both waited there; at each inside its bound."""
    seen = [Shares() for _ in cluster.addresses["replicas"]]
    end = time.monotonic() + LIMIT_S
    while time.monotonic() < end:
        got = dict.fromkeys(BOTH, 0.0)
        for number, book in enumerate(cluster.books()):
            assert set(book["clients"]) <= ALLOWED, book["clients"].keys()
            for name, service in seen[number].see(book).items():
                got[name] += service
        if min(got.values()) > TIMES_THE_BOUND * book["bound"]:
            return got
        time.sleep(0.5)
    raise AssertionError(f"little was served: {got}")


@pytest.mark.timeout(2 * LIMIT_S)
def test_fifty_invented_keys_and_forged_headers_get_no_share(flooded: Cluster) -> None:
    forged = {"x-fair-client": "honest", "x-tenant-id": "somebody", "x-fair-weight": "99@9223372036854775807"}
    invented = [keys.new_key() for _ in range(INVENTED)]
    before = flooded.status()["gateway"]["ignored headers"]
    with Asking(flooded.url, prompt_tokens=48, output_tokens=16) as asking:
        asking.ask("honest", CONNECTIONS)
        asking.ask("adversary", CONNECTIONS, forged)
        for key in invented:
            asking.ask(key, 1, forged)
        got = shares(flooded)
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
