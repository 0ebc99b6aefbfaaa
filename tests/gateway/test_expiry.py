"""A request that has not begun within its time to live: dropped where it waits, with 504, and nothing is charged."""

import asyncio
import json
from pathlib import Path

import pytest

from sglang_fair.common.deadlines import EXPIRED, HEADER_TTL
from sglang_fair.tenants.model import Limits
from tests.gateway.clusters import ENDPOINTS, Cluster, add_tenant, held_router
from tests.support.waiting import eventually

SOON = {HEADER_TTL: "50"}
KEY = {"authorization": "Bearer gold"}
PATH = "/v1/completions"


@pytest.fixture
def tenants(tmp_path: Path) -> Path:
    path = tmp_path / "tenants.yaml"
    add_tenant(path, "gold", limits={"tokens_per_minute": 10_000})
    return path


def is_dropped(answer: tuple[int, dict, bytes]) -> bool:
    status, headers, body = answer
    assert status == 504, body
    assert headers["content-type"] == "application/json"
    assert json.loads(body)["error"] == {
        "message": EXPIRED, "type": "service_unavailable_error", "param": None, "code": "expired",
    }  # fmt: skip
    return True


@pytest.mark.parametrize("stream", [False, True])
async def test_one_that_waits_at_the_router_leaves_it(c: Cluster, stream: bool) -> None:
    may_go_on = held_router(c)
    body = {**ENDPOINTS[PATH], "stream": stream}
    assert is_dropped(await c.post(PATH, body, headers=SOON))
    assert is_dropped(await c.post(PATH, body | {"ttl_ms": 50}))
    may_go_on.set()
    await eventually(lambda: c.gateway.link.alive, "the router answers again")
    await eventually(lambda: c.post(PATH, ENDPOINTS[PATH]), "it serves")
    await c.ended()
    assert len(c.replicas[0].requests) == 1
    async with c.http.get(c.url + "/metrics") as page:
        metrics = (await page.text()).splitlines()
    assert 'sglang_fair_refusals_total{status="504"} 2.0' in metrics


async def test_a_replica_that_drops_it_is_asked_once_and_its_client_is_charged_nothing(
    c: Cluster, tenants: Path
) -> None:
    [replica] = c.replicas
    replica.mode = "504"
    for path, body in ENDPOINTS.items():
        assert is_dropped(await c.post(path, {**body, "ttl_ms": 5_000}, headers=KEY))
        assert 0 < float(replica.headers[HEADER_TTL]) <= 5_000
        assert "ttl_ms" not in replica.body
    assert len(replica.requests) == len(ENDPOINTS)
    [(_, limit, left, _)] = await c.gateway.quotas.left("gold", Limits(tokens_per_minute=10_000))
    assert left == limit
    status, _, answer = await c.post(PATH, ENDPOINTS[PATH], headers=KEY)
    assert (status, json.loads(answer)["error"]["code"]) == (504, 504)  # of the replica's own
    assert HEADER_TTL not in replica.headers


async def test_of_several_answers_a_replica_drops_none(c: Cluster) -> None:
    assert (await c.post(PATH, {**ENDPOINTS[PATH], "n": 2}, headers={HEADER_TTL: "5000"}))[0] == 200
    assert HEADER_TTL not in c.replicas[0].headers


async def test_once_a_replica_has_it_the_replica_decides_and_there_is_no_other_one(c: Cluster) -> None:
    [replica] = c.replicas
    replica.mode = "endless"
    asked = asyncio.create_task(c.post(PATH, ENDPOINTS[PATH], headers=SOON))
    await eventually(lambda: replica.working == 1, "the replica has it")
    await asyncio.sleep(0.2)
    assert not asked.done()
    await replica.close()
    assert is_dropped(await asked)


@pytest.mark.parametrize("said", ["0", "-5", "soon", "1e12"])
async def test_what_is_no_time_to_live(c: Cluster, said: str) -> None:
    status, _, body = await c.post(PATH, ENDPOINTS[PATH], headers={HEADER_TTL: said})
    assert (status, json.loads(body)["error"]["param"]) == (400, HEADER_TTL)
    if said != "soon":
        status, _, body = await c.post(PATH, {**ENDPOINTS[PATH], "ttl_ms": float(said)})
        assert (status, json.loads(body)["error"]["param"]) == (400, "ttl_ms")
    assert not c.replicas[0].requests
