"""Why a request was served as it was: what gateway, router and replica remember of it, in one answer.

Each of the three is asked for the requests of one client, the sender's, or of all, if an operator asks. What cannot be
asked is None, with the reason; what nobody remembers is 404.
"""

import asyncio
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

import aiohttp
import msgspec

from router.client import RouterGone
from router.gateway.errors import ApiError
from router.gateway.record import MOST_FOUND, MOST_NAME, RequestRecord
from router.gateway.replicas.pool import Replicas
from router.gateway.routing.fleet import Fleet
from router.gateway.routing.links import Links

REPLICA_TIMEOUT_S = 5.0


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
    """Asks everybody."""

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
        own = self._record.find(name, client)
        router_error, placements = "", list[Mapping[str, Any]]()
        names = {name, *(exchange.name for exchange in own)}
        try:
            for one in names:
                placements += await self._link.explain(one, client)
        except RouterGone as error:
            router_error = str(error)
        by_id = {placement["id"]: placement for placement in placements}
        requests: list[dict[str, Any]] = []
        seen: set[str] = set()
        for exchange in own:
            shown = exchange.shown(time.monotonic())
            attempts = [self._attempt(one, by_id.get(one["id"])) for one in shown.pop("tries")]
            seen.update(one["id"] for one in attempts)
            requests.append({**shown, "gateway": True, "attempts": attempts})
        for placement in by_id.values():
            if placement["id"] not in seen:  # of another process, or forgotten here
                worker = (placement["worker"] or {}).get("worker", "")
                attempt = self._attempt({"id": placement["id"], "worker": worker}, placement)
                requests.append(
                    {
                        "request": placement["request"],
                        "client": placement["client"],
                        "gateway": False,
                        "attempts": [attempt],
                    }
                )
        requests = requests[:MOST_FOUND]
        await asyncio.gather(
            *(
                self._ask_replica(attempt, request["client"])
                for request in requests
                for attempt in request["attempts"]
            )
        )
        if not requests:
            raise ApiError(404, "no such request is remembered here", code="request_not_found")
        return Explained(requests, router_error)

    def _attempt(self, own: Mapping[str, Any], placement: Mapping[str, Any] | None) -> dict[str, Any]:
        return {**own, "router": placement, "replica": None, "replica_error": ""}

    async def _ask_replica(self, attempt: dict[str, Any], client: str) -> None:
        up = self._fleet.workers.get(attempt["worker"])
        if up is None:
            if attempt["worker"]:
                attempt["replica_error"] = "this replica is gone"
            return
        url = f"{up.url.rstrip('/')}/explain/{quote(attempt['id'], safe='')}"
        try:
            timeout = aiohttp.ClientTimeout(total=REPLICA_TIMEOUT_S)
            async with self._replicas.session.get(url, params={"client": client}, timeout=timeout) as answer:
                if answer.status == 200:
                    attempt["replica"] = (await answer.json())["requests"]
                elif answer.status == 404:
                    attempt["replica_error"] = "the replica remembers no such request"
                else:
                    attempt["replica_error"] = f"the replica answers {answer.status}"
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            attempt["replica_error"] = f"the replica does not answer: {type(error).__name__}"
