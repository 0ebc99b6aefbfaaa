"""Why a request was served as it was: what gateway, router and replica remember of it, in one answer.

Each of the three shows the requests of one client, the sender's, or of all, to an operator. Where one of them does not
answer there is None, with the reason; a request that none of them remembers is 404.
"""

import asyncio
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

import msgspec

from router.client import RouterGone
from router.gateway.errors import ApiError
from router.gateway.record import RequestRecord
from router.gateway.replicas.pool import Replicas
from router.gateway.routing.fleet import Fleet
from router.gateway.routing.links import Links
from sglang_fair.common.record import MOST_FOUND, MOST_NAME


class Explained(msgspec.Struct):
    """`GET /explain/ID`. Each request has what the `gateway` knows of it (None: another process served it), and its
    attempts, each with the router's placement and the records of the replica."""

    requests: list[dict[str, Any]]
    router: str = ""
    """Why the router could not be asked; "" if it could."""


class Latest(msgspec.Struct):
    """`GET /requests`: those that came last to this process, the latest first, each in a line."""

    requests: list[dict[str, Any]]


class Explainer:
    """Asks gateway, router and replicas."""

    def __init__(self, record: RequestRecord, link: Links, fleet: Fleet, replicas: Replicas) -> None:
        self._record = record
        self._link = link
        self._fleet = fleet
        self._replicas = replicas

    def latest(self, client: str | None, most: int) -> Latest:
        """The latest `most`, of `client` only if one is given."""
        now_s = time.monotonic()
        return Latest([one.row(now_s) for one in self._record.latest(client, most)])

    async def explain(self, name: str, client: str | None) -> Explained:
        """The requests of this name, or with an attempt of this id; of `client` only, if one is given. Raises
        `ApiError` 404."""
        name = name[:MOST_NAME]
        own, now_s = self._record.find(name, client), time.monotonic()
        router_error, by_id = "", dict[str, Mapping[str, Any]]()
        try:
            for one in {name, *(exchange.name for exchange in own)}:
                by_id |= {str(found["id"]): found for found in await self._link.explain(one, client)}
        except RouterGone as error:
            router_error = str(error)
        requests: list[dict[str, Any]] = []
        for shown in (exchange.shown(now_s) for exchange in own):
            attempts = [_attempt(one, by_id.pop(one["id"], None)) for one in shown.pop("tries")]
            requests.append({**shown, "gateway": True, "attempts": attempts})
        for id, placement in by_id.items():  # of another process, or forgotten here
            worker = (placement["worker"] or {}).get("worker", "")
            head = {key: placement[key] for key in ("request", "client")}
            attempts = [_attempt({"id": id, "worker": worker}, placement)]
            requests.append({**head, "gateway": False, "attempts": attempts})
        if not requests:
            raise ApiError(404, "no such request is remembered here", code="request_not_found")
        requests = requests[:MOST_FOUND]
        await asyncio.gather(
            *(
                self._ask_replica(attempt, request["client"])
                for request in requests
                for attempt in request["attempts"]
            )
        )
        return Explained(requests, router_error)

    async def _ask_replica(self, attempt: dict[str, Any], client: str) -> None:
        up = self._fleet.workers.get(attempt["worker"])
        if up is None:
            attempt["replica_error"] = "this replica is gone" if attempt["worker"] else ""
            return
        path = f"/explain/{quote(attempt['id'], safe='')}?client={quote(client, safe='')}"
        try:
            status, body = await self._replicas.get(up.url, path)
            if status == 200:
                attempt["replica"] = msgspec.json.decode(body)["requests"]
            elif status == 404:
                attempt["replica_error"] = "the replica remembers no such request"
            else:
                attempt["replica_error"] = f"the replica answers {status}"
        except (OSError, ValueError, LookupError, TypeError) as error:
            attempt["replica_error"] = f"the replica does not answer: {type(error).__name__}"


def _attempt(own: Mapping[str, Any], placement: Mapping[str, Any] | None) -> dict[str, Any]:
    return {**own, "router": placement, "replica": None, "replica_error": ""}
