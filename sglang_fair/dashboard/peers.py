"""The gateway and the replicas, as an operator asks them: with the keys that are in the environment.

Redirects are not followed, and nothing is read beyond `MAX_BODY_BYTES`.
"""

import asyncio
import json
import ssl
import time
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import quote

import aiohttp
import msgspec

from sglang_fair.common.service_keys import admin_key, replica_key
from sglang_fair.dashboard.model import Model
from sglang_fair.dashboard.reading import Reading, ReplicaReading, gateway_reading, replica_reading
from sglang_fair.dashboard.view import View

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
        asked = [self._get(f"{url.rstrip('/')}/fair", replica_key.headers()) for url in self._urls.values()]
        replicas: dict[str, ReplicaReading] = {}
        for name, answer in zip(list(self._urls), await asyncio.gather(*asked), strict=True):
            replicas |= replica_reading(name, *answer)
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


class Poller:
    """Looks at the cluster every so often, and keeps what is to be shown: one for any number of viewers. Belongs to one
    event loop."""

    def __init__(self, peers: Peers, every_s: float, looked: Callable[[], None] = lambda: None) -> None:
        """`looked` is called after each look."""
        self._peers, self._every_s, self._looked = peers, every_s, looked
        self._model = Model(every_s)
        self._encoded: dict[str, bytes] = {}

    async def run(self) -> None:
        """Looks until it is cancelled. A look that takes longer than the time between two delays the next."""
        while True:
            began_s = time.monotonic()
            self._model.take(await self._peers.look(), time.time())
            self._encoded.clear()
            self._looked()
            await asyncio.sleep(max(0.1, began_s + self._every_s - time.monotonic()))

    def view(self, span: str) -> View:
        return self._model.view(span)

    def encoded(self, span: str) -> bytes:
        """The same as JSON; made once a look, however many ask. KeyError for a span that there is not."""
        if span not in self._encoded:
            self._encoded[span] = msgspec.json.encode(self.view(span))
        return self._encoded[span]


def _reason(found: object) -> str:
    """What an error's body says: ours and OpenAI's, or FastAPI's."""
    if not isinstance(found, dict):
        return ""
    error = found.get("error")
    if isinstance(error, dict):
        return str(error.get("message", ""))
    return str(error or found.get("detail") or "")
