"""Why a request waited, on SGLang's real scheduler: the cause that is told is the one that made it wait."""

import asyncio
import json
from typing import Any

import aiohttp
import httpx
import pytest

from sglang_fair.core.waits import BATCH, CAUSES, DEFICIT, PROMPTS, STEP
from tests.support import fork_server
from tests.support.live import Replica
from tests.support.waiting import wait_until

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    ended = fork_server.run("-m", "tests.support.waiting_causes")
    assert ended.returncode == 0, ended.stderr[-3000:]
    records: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return records


@pytest.mark.parametrize(
    "why", [*(one for one in CAUSES if one not in (STEP, DEFICIT)), "memory, in SGLang's own order"]
)
def test_the_cause_that_is_told_is_the_one_that_made_it_wait(found: dict[str, Any], why: str) -> None:
    record, cause = found[why], why.partition(",")[0]
    assert record["waited_s"] > 0
    assert record["waited_for_s"] == {cause: pytest.approx(record["waited_s"])}


def test_who_waits_for_its_clients_deficit_is_overtaken_by_those_who_came_later(
    found: dict[str, Any],
) -> None:
    """Nine requests of others in three steps. In the last of them its client has its turn, and the step is full."""
    record = found["deficit"]
    assert record["waited_for_s"] == {DEFICIT: 2, PROMPTS: 1}
    assert record["overtaken_by"] == 9
    assert record["overtaken_in_batches"] == 3
    assert record["counter_at_arrival"] < 0 < record["counter_at_admission"]
    assert record["refills"] > 0


def ask(replica: Replica, id: str, **parameters: str) -> httpx.Response:
    return httpx.get(f"{replica.url}/explain/{id}", params=parameters, timeout=30)


def test_a_replica_explains_its_requests(one_at_a_time: Replica) -> None:
    """One waits until another one is aborted."""
    replica, blocks, waits = one_at_a_time, "b10c" + "0" * 28, "3a17" + "0" * 28

    async def scenario() -> None:
        async with aiohttp.ClientSession() as session:
            first = asyncio.create_task(replica.ask("blocks", [5] * 16, 20_000, session=session, rid=blocks))
            await asyncio.to_thread(
                wait_until, lambda: replica.fair()["totals"]["running"] == 1, "the blocker"
            )
            second = asyncio.create_task(replica.ask("waits", [6] * 16, 3, session=session, rid=waits))
            await asyncio.to_thread(
                wait_until, lambda: ask(replica, waits).status_code == 200, "the one that waits"
            )
            [now] = ask(replica, waits).json()["requests"]
            assert (now["state"], now["outcome"], now["running_at_arrival"]) == ("waiting", None, 1)
            await asyncio.to_thread(replica.abort, blocks)
            await asyncio.gather(first, second)

    asyncio.run(scenario())
    [waited] = ask(replica, waits, client="waits").json()["requests"]
    assert waited["state"] == "ended"
    assert waited["outcome"] == "finished"
    assert max(waited["waited_for_s"], key=waited["waited_for_s"].get) == BATCH
    assert sum(waited["waited_for_s"].values()) == pytest.approx(waited["waited_s"])
    assert (waited["extend_tokens"] + waited["cached_tokens"], waited["output_tokens"]) == (16, 3)
    assert waited["prefill_s"] > 0
    assert waited["decode_s"] > 0
    [blocked] = ask(replica, blocks).json()["requests"]
    assert blocked["outcome"] == "aborted"
    assert "waits" not in json.dumps(blocked)
    assert ask(replica, waits, client="blocks").status_code == 404
    assert ask(replica, "nobody").status_code == 404


@pytest.mark.parametrize(
    ("body", "number"),
    [
        ({"input_ids": [7] * 16, "rid": "a" * 32, "sampling_params": {"n": 3, "max_new_tokens": 3}}, 4),
        (
            {
                "input_ids": [[8] * 16, [9] * 16],
                "rid": ["b" * 32, "c" * 32],
                "sampling_params": {"max_new_tokens": 3},
            },
            2,
        ),
    ],
)
def test_all_that_sglang_makes_of_one_attempt_is_told(
    one_at_a_time: Replica, body: dict[str, Any], number: int
) -> None:
    """Of n answers SGLang makes n requests, and one that computes the prompt."""
    attempt = f"attempt-{number}"
    headers = {"x-fair-client": "several", "x-fair-attempt": attempt}
    answer = httpx.post(f"{one_at_a_time.url}/generate", json=body, headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text
    records = ask(one_at_a_time, attempt, client="several").json()["requests"]
    assert [one["outcome"] for one in records] == ["finished"] * number
    assert sum(one["output_tokens"] for one in records) >= 3 * len(answer.json())
