"""A replica drops what has not begun within its time to live; what has begun runs to its end."""

import asyncio
import json
from typing import Any

import httpx
import pytest

from sglang_fair.common.deadlines import EXPIRED, HEADER_TTL
from tests.overlay.test_charges import ENDPOINTS, gained, idle
from tests.support.live import Answer, Replica
from tests.support.waiting import wait_until

pytestmark = pytest.mark.engine


def test_what_waits_for_too_long_is_dropped_and_what_has_begun_is_not(one_at_a_time: Replica) -> None:
    """Streams get the status, too; ids that others share, or begin with, do not matter."""
    replica, before = one_at_a_time, idle(one_at_a_time)
    asked: list[tuple[str, dict[str, Any]]] = [
        (path, {**body, "stream": stream}) for path, body in ENDPOINTS.items() for stream in (False, True)
    ]
    asked.append(("/generate", {**ENDPOINTS["/generate"], "rid": "w"}))

    async def scenario() -> tuple[list[httpx.Response], httpx.Response]:
        grown = Answer()
        running = asyncio.create_task(
            replica.ask("runs", [7] * 40, 20_000, headers={HEADER_TTL: "1000"}, rid="wanted", answer=grown)
        )
        async with httpx.AsyncClient(base_url=replica.url, timeout=60) as http:
            await asyncio.to_thread(
                wait_until, lambda: replica.fair()["totals"]["running"] == 1, "a request that runs"
            )
            late = {"x-fair-client": "late", HEADER_TTL: "300"}
            patient = asyncio.create_task(
                http.post("/generate", json=ENDPOINTS["/generate"], headers={"x-fair-client": "patient"})
            )
            answers = await asyncio.gather(*[
                http.post(path, json=body, headers=late) for path, body in asked
            ])  # fmt: skip
            at_first = grown.output_tokens
            await asyncio.to_thread(
                wait_until,
                lambda: grown.output_tokens > at_first,
                "it runs on after its own time, and theirs",
            )
            running.cancel()
            return list(answers), await patient

    answers, patient = asyncio.run(scenario())
    for answer in answers:
        assert answer.status_code == 504, answer.text
        assert EXPIRED in json.dumps(answer.json())
    assert patient.status_code == 200
    after = idle(replica)
    assert after["expired"] - before["expired"] == len(asked)
    for what in ("requests", "extend_tokens", "cached_tokens", "output_tokens", "service"):
        assert gained(before, after, "late", what) == 0
    assert after["corrections"] == before["corrections"]
    replica.flush()  # which only an engine that holds nothing does


def test_what_is_no_time_to_live_is_refused(one_at_a_time: Replica) -> None:
    for path, body in ENDPOINTS.items():
        answer = httpx.post(f"{one_at_a_time.url}{path}", json=body, headers={HEADER_TTL: "soon"}, timeout=60)
        assert answer.status_code == 400, answer.text
        assert HEADER_TTL in answer.text
