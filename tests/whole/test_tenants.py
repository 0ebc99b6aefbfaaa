"""Tenants on a whole cluster: an adversary with invented keys and forged headers gets the share of its one key."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random

import aiohttp
import httpx
import pytest

from router.gateway.guard import KEY_VARIABLE
from sglang_fair.common.identity import ANONYMOUS
from sglang_fair.common.service_keys import bearer, replica_key
from sglang_fair.tenants import edit, keys
from sglang_fair.tenants.model import Limits, Tenant
from tests.support.live import EMULATED, Cluster
from tests.support.shares import Shares

pytestmark = pytest.mark.e2e

ENVIRONMENT = {KEY_VARIABLE: "the admin's key", replica_key.variable: "the replicas' key"}
ALLOWED = {"honest", "adversary", "thrifty", ANONYMOUS, "(system)"}
"""SGLang asks itself, without a name, when it starts."""
BOTH = ("honest", "adversary")
CONNECTIONS = 24
"""Of each tenant, over both replicas: more than run at a time, so that some always wait."""
INVENTED = 50
PROMPT_TOKENS, OUTPUT_TOKENS = 24, 16
TIMES_THE_BOUND = 16
LIMIT_S = 400
"""For a busy machine; an idle one needs a tenth."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    path: Path = tmp_path_factory.mktemp("tenants") / "tenants.yaml"
    for name in ("honest", "adversary"):
        edit.add(path, name, Tenant(keys=[keys.written(keys.digest(name))]))
    edit.add(
        path, "thrifty", Tenant(keys=[keys.written(keys.digest("thrifty"))], limits=Limits(output_tokens=4))
    )
    arguments = (*EMULATED, "--quantum", "100", "--tenants", str(path), "--", "--max-running-requests", "4")
    with Cluster(*arguments, environment=ENVIRONMENT) as made:
        yield made


async def flood(
    url: str, key: str, headers: dict[str, str], found: Counter[int], stop: asyncio.Event
) -> None:
    """Asks with this key, one request after the other, until `stop`; counts the statuses."""
    random = Random(key)
    async with aiohttp.ClientSession(headers=bearer(key) | headers) as http:
        while not stop.is_set():
            body = {
                "input_ids": [random.randrange(3, 250) for _ in range(PROMPT_TOKENS)],
                "sampling_params": {"max_new_tokens": OUTPUT_TOKENS, "ignore_eos": True, "temperature": 0},
            }
            async with http.post(f"{url}/generate", json=body) as answer:
                await answer.read()
                found[answer.status] += 1
            if answer.status == 401:
                await asyncio.sleep(0.5)  # so many keys leave the machine's two cores to the engines


async def shares(cluster: Cluster) -> dict[str, float]:
    """What both got at all replicas while both waited there; at each inside its bound."""
    seen: dict[int, Shares] = {}
    while True:
        got = dict.fromkeys(BOTH, 0.0)
        for number, book in enumerate(await asyncio.to_thread(cluster.books)):
            assert set(book["clients"]) <= ALLOWED, book["clients"].keys()
            for name, service in seen.setdefault(number, Shares(dict.fromkeys(BOTH, 1.0))).see(book).items():
                got[name] += service
        if min(got.values()) > TIMES_THE_BOUND * book["bound"]:
            return got
        await asyncio.sleep(0.5)


@pytest.mark.timeout(2 * LIMIT_S)
def test_fifty_invented_keys_and_forged_headers_get_no_share(cluster: Cluster) -> None:
    forged = {"x-fair-client": "honest", "x-tenant-id": "somebody", "x-fair-weight": "99@9223372036854775807"}
    before = cluster.status()["gateway"]["ignored headers"]
    honest, adversary, invented = Counter[int](), Counter[int](), Counter[int]()

    async def main() -> dict[str, float]:
        stop = asyncio.Event()
        floods = [flood(cluster.url, "honest", {}, honest, stop) for _ in range(CONNECTIONS)]
        floods += [flood(cluster.url, "adversary", forged, adversary, stop) for _ in range(CONNECTIONS)]
        floods += [flood(cluster.url, keys.new_key(), forged, invented, stop) for _ in range(INVENTED)]
        work = [asyncio.create_task(one) for one in floods]
        try:
            async with asyncio.timeout(LIMIT_S):
                return await shares(cluster)
        finally:
            stop.set()
            await asyncio.gather(*work)

    got = asyncio.run(main())
    assert set(honest) == set(adversary) == {200}
    assert set(invented) == {401}
    assert invented[401] >= INVENTED
    assert got["honest"] / got["adversary"] == pytest.approx(1, rel=0.2), got
    after = cluster.status()["gateway"]["ignored headers"]
    for header in forged:
        more = after.get(header, 0) - before.get(header, 0)
        assert more == invented[401] + adversary[200]


def test_replicas_answer_whoever_has_their_key(cluster: Cluster) -> None:
    for url in cluster.addresses["replicas"]:
        for key, status in (("honest", 401), ("the admin's key", 401), ("the replicas' key", 200)):
            assert httpx.get(f"{url}/fair", headers=bearer(key), timeout=30).status_code == status
        weights = {"client_weights": {"adversary": 9}}
        answer = httpx.post(f"{url}/fair", json=weights, headers=bearer("adversary"), timeout=30)
        assert answer.status_code == 401
        body = {"text": "x", "sampling_params": {"max_new_tokens": 1}}
        assert httpx.post(f"{url}/generate", json=body, timeout=30).status_code == 401


def test_operators_have_an_address_of_their_own(cluster: Cluster) -> None:
    assert cluster.addresses["admin"] != cluster.url
    for key in (None, "honest", "the replicas' key"):
        headers = {} if key is None else bearer(key)
        assert (
            httpx.get(f"{cluster.addresses['admin']}/status", headers=headers, timeout=30).status_code == 401
        )
        assert httpx.get(f"{cluster.url}/status", headers=headers, timeout=30).status_code == 404
    assert cluster.status()["gateway"]["tenants"]["failures"] == 0


def test_the_longest_answer_is_what_the_engine_makes(cluster: Cluster) -> None:
    """By the engine's own count, for requests that name no limit."""
    requests = {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
        "/v1/completions": {"prompt": "x"},
        "/generate": {"text": "x", "sampling_params": {"ignore_eos": True}},
    }
    for path, body in requests.items():
        with contextlib.closing(httpx.Client(headers=bearer("thrifty"), timeout=60)) as http:
            answer = http.post(cluster.url + path, json=body | {"ignore_eos": True}).json()
        made = answer["usage"] if "usage" in answer else answer["meta_info"]
        assert made["completion_tokens"] == 4, path
