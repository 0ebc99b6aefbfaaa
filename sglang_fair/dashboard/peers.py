"""The gateway and the replicas, as an operator asks them: with the keys that are in the environment.

A body that is no report of ours is a state of its own, never an error. Redirects are not followed, and nothing is read
beyond `MAX_BODY_BYTES`.
"""

import asyncio
import json
import ssl
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

import aiohttp
import msgspec

from sglang_fair.common.service_keys import admin_key, replica_key
from sglang_fair.dashboard.reading import (
    GatewayReading,
    Ranks,
    Reading,
    ReplicaReading,
    ReplicaReport,
    Status,
)

TIMEOUT_S = 5.0
MAX_BODY_BYTES = 32 << 20


class Refused(RuntimeError):
    """The gateway or a replica did not do what was asked; the text says who and why."""

    def __init__(self, text: str, status: int = 502) -> None:
        super().__init__(text)
        self.status = status


class Peers:
    """Belongs to one event loop; `close` it."""

    def __init__(
        self,
        gateway: str,
        gateway_tls: ssl.SSLContext | None = None,
        replica_tls: ssl.SSLContext | None = None,
    ) -> None:
        """`gateway` is its address for operators; `gateway_tls` and `replica_tls` are for https:// addresses. None: as
        the system believes."""
        self._gateway = gateway.rstrip("/")
        self._gateway_tls, self._replica_tls = gateway_tls or True, replica_tls or True
        self._urls: dict[str, str] = {}
        """The replicas' addresses, as the gateway said last."""
        self._has_tenants = False
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_S))

    async def close(self) -> None:
        await self._session.close()

    async def look(self) -> Reading:
        """One look at the whole cluster. Replicas are asked also while the gateway does not answer."""
        front = gateway_reading(*await self._get(f"{self._gateway}/status", admin_key.headers()))
        if front.status is not None:
            self._urls = {name: worker.url for name, worker in front.status.workers.items() if worker.url}
            self._has_tenants = front.status.gateway.tenants is not None
        replicas: dict[str, ReplicaReading] = {}
        asked = [self._replica(name, url) for name, url in self._urls.items()]
        for found in await asyncio.gather(*asked):
            replicas |= found
        return Reading(front, replicas)

    async def requests(self, client: str | None, most: int) -> Any:
        """The last requests, newest first, as the gateway tells them. Raises `Refused`."""
        wanted = f"limit={most}" + (f"&client={quote(client, safe='')}" if client else "")
        return self._read(*await self._get(f"{self._gateway}/requests?{wanted}", admin_key.headers()))

    async def explain(self, request_id: str) -> Any:
        """Why a request waited, as the gateway tells it. Raises `Refused`."""
        path = f"{self._gateway}/explain/{quote(request_id, safe='')}"
        return self._read(*await self._get(path, admin_key.headers()))

    async def set_weight(self, client: str, weight: float) -> None:
        """Changes a weight: in the tenants' file where there is one, else in each replica, until it is restarted.
        Raises `Refused`."""
        if self._has_tenants:
            url = f"{self._gateway}/tenants/{quote(client, safe='')}"
            self._read(*await self._send("PATCH", url, {"weight": weight}, admin_key.headers()))
            return
        body = {"client_weights": {client: weight}}
        asked = [
            self._send("POST", f"{url.rstrip('/')}/fair", body, replica_key.headers())
            for url in self._urls.values()
        ]
        if not asked:
            raise Refused("no replica is known", 503)
        for name, answer in zip(self._urls, await asyncio.gather(*asked), strict=True):
            try:
                self._read(*answer)
            except Refused as error:
                raise Refused(f"{name}: {error}", error.status) from None

    async def _replica(self, name: str, url: str) -> dict[str, ReplicaReading]:
        return replica_reading(name, *await self._get(f"{url.rstrip('/')}/fair", replica_key.headers()))

    def _read(self, status: int | None, body: bytes) -> Any:
        try:
            found = json.loads(body)
        except (ValueError, RecursionError):
            found = None
        if status is None:
            raise Refused("no answer", 502)
        if status >= 300 or found is None:
            raise Refused(_reason(found) or f"HTTP status {status}", status if 400 <= status < 500 else 502)
        return found

    async def _get(self, url: str, headers: Mapping[str, str]) -> tuple[int | None, bytes]:
        return await self._send("GET", url, None, headers)

    async def _send(
        self, method: str, url: str, body: object, headers: Mapping[str, str]
    ) -> tuple[int | None, bytes]:
        """Status and body; status None if there was no answer."""
        tls = self._gateway_tls if url.startswith(f"{self._gateway}/") else self._replica_tls
        try:
            async with self._session.request(
                method, url, json=body, headers=headers, allow_redirects=False, ssl=tls
            ) as answer:
                raw = bytearray()
                async for piece in answer.content.iter_any():
                    raw += piece
                    if len(raw) > MAX_BODY_BYTES:
                        return None, b""
                return answer.status, bytes(raw)
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
            return None, b""


def gateway_reading(status: int | None, body: bytes) -> GatewayReading:
    """What an answer of `/status` says; `status` None: there was none."""
    if status in (401, 403):
        return GatewayReading("denied")
    found = _decoded(body, Status) if status == 200 else None
    if found is None:
        return GatewayReading("down")
    return GatewayReading("router down" if found.gateway.fallback else "up", found)


def replica_reading(name: str, status: int | None, body: bytes) -> dict[str, ReplicaReading]:
    """What an answer of `/fair` says, for each scheduler of the replica: `r0`, or `r0.0` and `r0.1`."""
    if status in (401, 403):
        return {name: ReplicaReading("denied")}
    if status == 404:
        return {name: ReplicaReading("no overlay")}
    if status == 200:
        if (one := _decoded(body, ReplicaReport)) is not None:
            return {name: ReplicaReading("ok", one)}
        if (ranks := _decoded(body, Ranks)) is not None:
            return {
                f"{name}.{rank}": ReplicaReading("ok", report)
                for rank, report in enumerate(ranks.data_parallel)
            }
    return {name: ReplicaReading("silent")}


def _decoded(body: bytes, kind: type[Any]) -> Any:
    """A `kind`; None for anything else."""
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def _reason(found: object) -> str:
    """What an error's body says: ours and OpenAI's, or FastAPI's."""
    if not isinstance(found, dict):
        return ""
    error = found.get("error")
    if isinstance(error, dict):
        return str(error.get("message", ""))
    return str(error or found.get("detail") or "")
