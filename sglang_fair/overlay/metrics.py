"""`/metrics` on a replica: our numbers, and behind them SGLang's own where `--enable-metrics` asks for these.

It names clients, so whoever has SGLang's `--api-key` may read it, as with `/fair`; SGLang itself would show its numbers
to everybody. The scheduler is asked for ours, between two of its steps. If it does not answer within `ANSWER_S`, the
page has SGLang's and says so (`scheduler_answers`).
"""

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sglang_fair.metrics.differences import Differences, Waiting
from sglang_fair.metrics.table import TOKEN_KINDS

STATE = "fair_metrics"
"""Where SGLang's answer about a scheduler's state has what `ReplicaFairness.metrics` says."""

ANSWER_S = 5.0

Row = tuple[str, Sequence[str], Any]


class Page:
    """The page of one HTTP process."""

    def __init__(self, manager: Any) -> None:
        """`manager` is SGLang's tokenizer manager."""
        self._manager = manager
        self._differences: dict[int, Differences] = {}
        self._asking: asyncio.Task[Any] | None = None

    async def answer(self, authorization: str | None) -> Any:
        """The answer to `GET /metrics` with this header."""
        from fastapi import Response
        from sglang.srt.utils.auth import AuthLevel, decide_request_auth

        from sglang_fair.metrics import exposition

        arguments = self._manager.server_args
        verdict = decide_request_auth(
            method="GET",
            path="/fair",  # SGLang lets everybody see /metrics
            authorization_header=authorization,
            api_key=arguments.api_key,
            admin_api_key=arguments.admin_api_key,
            auth_level=AuthLevel.NORMAL,
        )
        if not verdict.allowed:
            return Response(status_code=verdict.error_status_code)
        states = await self._states()
        more = ("dp_rank",) if len(states) > 1 else ()
        rows = [
            (name, (*labels, str(rank)) if more else labels, number)
            for rank, state in enumerate(states)
            for name, labels, number in self._rows(rank, state)
        ]
        page = exposition.text(rows or [("scheduler_answers", (), 0)], more)
        if arguments.enable_metrics:
            page += await asyncio.to_thread(_sglangs)
        return Response(page, headers={"content-type": exposition.CONTENT_TYPE})

    async def _states(self) -> list[Mapping[str, Any]]:
        """What each scheduler says; empty if one does not in time. Pages that are asked for meanwhile wait together."""
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._manager.get_internal_state())
        try:
            states = await asyncio.wait_for(asyncio.shield(self._asking), ANSWER_S)
        except TimeoutError:
            return []
        return [state[STATE] for state in states]

    def _rows(self, rank: int, state: Mapping[str, Any]) -> Iterator[Row]:
        yield from client_rows(state)
        yield "scheduler_answers", (), 1
        yield "waiting_tokens", (), state["waiting_tokens"]
        yield "policy_refusals_total", (), state["refused"]
        yield "expired_requests_total", (), state["expired"]
        yield "evictions_total", (), state["evictions"]
        yield "books_balanced", (), state["books_ok"]
        yield "books_corrections_total", (), state["corrections"]
        if state["refills"] is not None:
            yield "refills_total", (), state["refills"]
        if state["bound"] is not None:
            yield "bound_units", (), state["bound"]
        differences = self._differences.setdefault(rank, Differences())
        differences.read(time.monotonic(), waiting_of(state))
        yield "difference_units", (), differences.difference or 0.0
        yield "jain_index", (), 1.0 if differences.jain is None else differences.jain


def client_rows(state: Mapping[str, Any]) -> Iterator[Row]:
    """The rows with a client's label."""
    for client, one in state["clients"].items():
        for kind in TOKEN_KINDS:
            yield "tokens_total", (client, kind), one[f"{kind}_tokens"]
        yield "service_units_total", (client,), one["service"]
        yield "admitted_requests_total", (client,), one["requests"]
        for name, key in (("deficit_units", "deficit"), ("weight", "weight"),
                          ("requests_waiting", "waiting"), ("requests_running", "running")):  # fmt: skip
            if one.get(key) is not None:
                yield name, (client,), one[key]
    for client, waits in state["waits"].items():
        yield "queue_wait_seconds", (client,), waits


def waiting_of(state: Mapping[str, Any]) -> dict[str, Waiting]:
    """The labelled clients that wait."""
    return {
        client: Waiting(one["backlog"], one["charged"] / one["weight"], one["weight"])
        for client, one in state["clients"].items()
        if one.get("backlog") is not None
    }


def _sglangs() -> bytes:
    """SGLang's numbers, of all its processes."""
    from prometheus_client import CollectorRegistry, generate_latest, multiprocess

    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
    return generate_latest(registry)
