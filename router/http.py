"""The router's HTTP server: whether it lives, whether it can place, and its numbers for Prometheus.

    GET /healthz    200: the loop that places requests answers; one that hangs answers nothing
    GET /readyz     200: and there is a replica that takes requests; 503 from SIGTERM on
    GET /metrics

It names no client, so it needs no key; pages of other sites get no numbers (`common.guard`). It runs in the loop that
places requests.
"""

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from typing import Any, get_args

from aiohttp import web

from router import bounded
from router.events import Outcome
from router.shell import Shell
from sglang_fair.common.guard import objection
from sglang_fair.metrics import exposition
from sglang_fair.metrics.table import PLAN_OUTCOMES, REASONS, STATES

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

ENDINGS = get_args(Outcome)


async def serve(
    listener: socket.socket,
    shell: Shell,
    tls: ssl.SSLContext | None = None,
    leaving: asyncio.Event | None = None,
    names: Collection[str] = (),
) -> None:
    """Serves at `listener`, which is closed at the end, until it is cancelled; with `tls` over https. Once `leaving` is
    set it is not ready. `names`: those of this machine by which a page may call it."""

    async def healthz(_: web.Request) -> web.Response:
        return _short(True)

    async def readyz(_: web.Request) -> web.Response:
        if leaving is not None and leaving.is_set():
            return _short(False, "the router is about to end")
        known = shell.listing()
        out = {*known.draining, *known.sick}
        takes = any(up.worker not in out for up in known.workers)
        return _short(takes, "there is no replica that takes requests")

    async def metrics(_: web.Request) -> web.Response:
        page = exposition.text(rows(shell.snapshot()))
        return web.Response(body=page, headers={"content-type": exposition.CONTENT_TYPE})

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        is_open = request.path != "/metrics"  # the others say nothing that is worth a page's while
        why = None if is_open else objection(request.method, request.headers, names)
        return await handler(request) if why is None else web.json_response({"status": why}, status=403)

    app = web.Application(middlewares=[guard])
    app.add_routes([web.get(f"/{page.__name__}", page) for page in (healthz, readyz, metrics)])
    async with bounded.serving(app, listener, tls):
        await asyncio.Event().wait()


def _short(is_ok: bool, otherwise: str = "") -> web.Response:
    return web.json_response(
        {"status": "ok"} if is_ok else {"status": otherwise}, status=200 if is_ok else 503
    )


def rows(state: Mapping[str, Any]) -> Iterator[exposition.Row]:
    """The numbers in a snapshot of the router."""
    counts, workers, hits = state["counts"], state["workers"], state["hits"]
    for worker, one in workers.items():
        for reason in REASONS:
            yield "router_placements_total", (worker, reason), one["placed"].get(reason, 0)
        yield "router_worker_info", (worker, one["model"]), 1
        yield "router_requests_in_flight", (worker,), one["in_flight"]
        yield "router_prefill_tokens_left", (worker,), one["prefill_tokens"]
        yield "router_decode_tokens_left", (worker,), one["decode_tokens"]
        yield "router_tree_tokens", (worker,), one["tree_tokens"]
    for worker, swap in state["swaps"].items():
        yield "router_swaps_total", (worker, "ok"), swap["swaps"]
        yield "router_swaps_total", (worker, "failed"), swap["failed"]
        yield "router_swap_seconds_total", (worker,), swap["seconds"]
    for name in STATES:
        yield "router_workers", (name,), sum(one["state"] == name for one in workers.values())
    for outcome in ENDINGS:
        yield "router_ended_total", (outcome,), counts.get(f"ended {outcome}", 0)
    yield "router_refusals_total", (), counts.get("refused", 0)
    yield "router_prompt_tokens_total", (), hits["input_tokens"]
    yield "router_predicted_hit_tokens_total", (), hits["predicted_tokens"]
    yield "router_measured_prompt_tokens_total", (), hits["measured_input_tokens"]
    yield "router_measured_predicted_tokens_total", (), hits["measured_predicted_tokens"]
    yield "router_measured_hit_tokens_total", (), hits["measured_cached_tokens"]
    yield "router_requests_waiting", (), state["waiting"]
    suspects = state["suspects"]
    for event, count in suspects["counts"].items():
        yield "router_suspects_total", (event,), count
    yield "router_suspects_waiting", (), suspects["waiting"]
    yield "router_quarantined_clients", (), suspects["clients"]
    if state.get("queues") is not None:
        yield from queue_rows(state["queues"])
    yield "router_peers", (), state["wire"]["peers"]
    yield "router_refused_peers_total", (), state["wire"]["refused"]


def queue_rows(queues: Mapping[str, Any]) -> Iterator[exposition.Row]:
    """The numbers of queues with deadlines, in a snapshot."""
    for row in queues.get("waiting", ()):
        labels = row["model"], row["class"], str(row["tier"])
        yield "router_queue_requests", labels, row["requests"]
        yield "router_queue_late_requests", labels, row["late"]
    yield "router_queue_groups", (), queues.get("groups", 0)
    if (plans := queues.get("plans")) is not None:
        yield "router_plans_asked_total", (), plans["asked"]
        for outcome in PLAN_OUTCOMES:
            yield "router_plans_total", (outcome,), plans[outcome]
        yield "router_plan_entries_ignored_total", (), plans["ignored"]
        last = plans["last"] or {}
        for tier, name in (("0", "late_s"), ("1", "later_s")):
            yield "router_planned_lateness", (tier,), last.get(name, 0)
    shortage = queues.get("shortage") or {}
    yield "router_replicas_short", (), shortage.get("more") or shortage.get("least") or 0
    if queues.get("r2") is not None:
        yield "router_wait_r2", (), queues["r2"]
