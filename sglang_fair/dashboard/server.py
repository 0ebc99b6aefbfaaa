"""The page and what it asks for, over HTTP.

GET /                     the page                    GET /health         whether it has started
GET /view?span=10+min     what to show, as JSON       GET /requests/ID    why one waited
GET /requests?client=     the last requests           PATCH /clients/NAME {"weight": 2}

With the admin key it opens to whoever has that, as a bearer token or as the password of HTTP's own Basic scheme, which
a browser asks for; without a key, to this machine alone.
"""

import asyncio
import base64
import contextlib
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from importlib import resources

from aiohttp import web

from sglang_fair.cluster.explain import in_words
from sglang_fair.common.guard import objection
from sglang_fair.common.service_keys import is_same
from sglang_fair.dashboard.model import SPANS
from sglang_fair.dashboard.peers import Peers, Poller, Refused

MAX_BODY_BYTES = 4096
MOST_REQUESTS = 200
"""That are asked for: of a flood most are still waiting."""

LEAST_WEIGHT, MOST_WEIGHT = 1e-6, 1e6

TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}

HEADERS = {
    # Everything comes from here, and nothing is written into the page itself.
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "same-origin",  # with less, a form's Origin is null
    "cache-control": "no-store",
}

CHALLENGE = {"www-authenticate": 'Basic realm="sglang-fair: the admin key as password", charset="UTF-8"'}
LOCAL = ("127.0.0.1", "::1")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def may(key: str, peer: str | None, authorization: str) -> bool:
    """Whether a request may see and change the cluster. `key` is "" if there is none."""
    if not key:
        return peer in LOCAL
    scheme, _, given = authorization.partition(" ")
    if scheme.lower() == "basic":
        try:
            given = base64.b64decode(given).decode().partition(":")[2]
        except ValueError:
            return False
    elif scheme.lower() != "bearer":
        return False
    return is_same(given.strip(), key)


def application(
    gateway: str,
    every_s: float,
    key: str,
    gateway_tls: ssl.SSLContext | None = None,
    replica_tls: ssl.SSLContext | None = None,
    names: Collection[str] = (),
) -> web.Application:
    """The page about the cluster behind `gateway`; it looks at it from its start to its end. What gateway and replicas
    must show is as `Peers` has it, and `names` are those of the page as `objection` has them."""
    page = _Page(key, names, lambda: Peers(gateway, gateway_tls, replica_tls), every_s)

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        return await page.guard(request, handler)

    app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[guard])
    app.cleanup_ctx.append(page.look)
    app.add_routes(
        [
            web.get("/", page.file("index.html")),
            *(web.get(f"/{name}", page.file(name)) for name in page.files if not name.endswith(".html")),
            web.get("/view", page.view),
            web.get("/health", page.health),
            web.get("/requests", page.requests),
            web.get("/requests/{id:.+}", page.explain),
            web.patch("/clients/{name:.+}", page.change),
        ]
    )
    return app


class _Page:
    """Its handlers."""

    _peers: Peers
    _poller: Poller

    def __init__(
        self, key: str, names: Collection[str], connect: Callable[[], Peers], every_s: float
    ) -> None:
        folder = resources.files(__package__).joinpath("page")
        self.files = {path.name: path.read_bytes() for path in folder.iterdir()}
        self._key, self._names = key, names
        self._connect, self._every_s = connect, every_s

    async def look(self, _: web.Application) -> AsyncIterator[None]:
        self._peers = self._connect()
        self._poller = Poller(self._peers, self._every_s)
        task = asyncio.create_task(self._poller.run())
        yield
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await self._peers.close()

    def file(self, name: str) -> Handler:
        async def send(request: web.Request) -> web.Response:
            kind = TYPES["." + name.rpartition(".")[2]]
            return web.Response(body=self.files[name], content_type=kind, charset="utf-8")

        return send

    async def view(self, request: web.Request) -> web.Response:
        span = request.query.get("span", next(iter(SPANS)))
        if span not in SPANS:
            raise Refused(f"there is no span {span!r:.40}; there are {', '.join(SPANS)}", 400)
        return web.Response(body=self._poller.encoded(span), content_type="application/json")

    async def health(self, _: web.Request) -> web.Response:
        return web.Response(text="ok")

    async def requests(self, request: web.Request) -> web.Response:
        try:
            found = await self._peers.requests(request.query.get("client"), MOST_REQUESTS)
        except Refused as error:  # a state to show, as others: no error of this page
            found = {"requests": [], "kept": error.status != 404, "said": f"No data: {error}."}
        return web.json_response(found)

    async def explain(self, request: web.Request) -> web.Response:
        return web.json_response({"text": in_words(await self._peers.explain(request.match_info["id"]))})

    async def change(self, request: web.Request) -> web.Response:
        weight = _weight(await request.read())
        await self._peers.set_weight(request.match_info["name"], weight)
        return web.json_response({"weight": weight})

    async def guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            response = await self._answer(request, handler)
        except web.HTTPException as error:
            response = error
        response.headers.update(HEADERS)
        if isinstance(response, web.HTTPException):
            raise response
        return response

    async def _answer(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path != "/health":
            if why := objection(request.method, request.headers, self._names, is_known=bool(self._key)):
                return _error(why, 403)
            if not may(self._key, request.remote, request.headers.get("authorization", "")):
                if not self._key:
                    return _error("this is for the machine itself", 403)
                response = _error("this needs the admin key", 401)
                response.headers.update(CHALLENGE)
                return response
        try:
            return await handler(request)
        except Refused as error:
            return _error(str(error), error.status)


def _weight(body: bytes) -> float:
    try:
        weight = json.loads(body)["weight"]
    except (ValueError, KeyError, TypeError, RecursionError):
        weight = None
    if isinstance(weight, bool) or not isinstance(weight, int | float):
        raise Refused('the body must be {"weight": NUMBER}', 400)
    if not LEAST_WEIGHT <= weight <= MOST_WEIGHT:
        raise Refused(f"a weight is a number from {LEAST_WEIGHT:g} to {MOST_WEIGHT:g}", 400)
    return float(weight)


def _error(text: str, status: int) -> web.Response:
    return web.json_response({"error": {"message": text}}, status=status)
