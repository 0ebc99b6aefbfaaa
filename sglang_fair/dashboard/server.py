"""The page and what it asks for, over HTTP.

GET /                     the page                    POST /login, POST /logout     the admin key for a cookie
GET /view?span=10+min     what to show, as JSON       GET /health                   for whoever waits for the start
GET /requests?client=     the last requests           GET /requests/ID              why one waited
PATCH /clients/NAME       {"weight": 2}: a change that the operator wants
"""

import asyncio
import contextlib
import hashlib
import hmac
import json
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from importlib import resources

from aiohttp import web

from sglang_fair.cluster.explain import in_words
from sglang_fair.common.guard import FORM, JSON, objection
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

OPEN = ("/login", "/health", "/favicon.svg", "/style.css", "/login.js", "/theme.js")
"""What a browser needs before it has given a key."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


HOLDS_S = 24 * 3600
LOCAL = ("127.0.0.1", "::1")


class Session:
    """Who may open the page: whoever has the admin key, and no tenant's; without a key, this machine alone.

    A browser gives the key once and gets a cookie that says until when it holds, with a digest that only the key can
    make. So nothing is kept here, and the page stays open when this process is started again.
    """

    def __init__(self, key: str, port: int, *, is_secure: bool = False) -> None:
        """`key` is "" if there is none. `port` is the page's: browsers send a cookie to all ports of a machine.
        `is_secure`: it is served over https, and the cookie is sent over nothing else."""
        self.is_secure = is_secure
        self._key = key.encode()
        self.cookie = f"sglang-fair-{port}"

    @property
    def needs_key(self) -> bool:
        return bool(self._key)

    def is_key(self, given: str) -> bool:
        return self.needs_key and hmac.compare_digest(given.encode("utf-8", "surrogatepass"), self._key)

    def issue(self) -> str:
        """A cookie that holds for `HOLDS_S`."""
        until = str(int(time.time()) + HOLDS_S)
        return f"{until}.{self._digest(until)}"

    def may(self, peer: str | None, headers: Mapping[str, str], cookies: Mapping[str, str]) -> bool:
        """Whether a request may see and change the cluster."""
        if not self.needs_key:
            return peer in LOCAL
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer":
            return self.is_key(given.strip())
        until, _, digest = cookies.get(self.cookie, "").partition(".")
        return is_same(digest, self._digest(until)) and until.isdecimal() and time.time() < int(until)

    def _digest(self, until: str) -> str:
        return hmac.new(
            self._key, f"page until {until}".encode("utf-8", "surrogatepass"), hashlib.sha256
        ).hexdigest()


def application(
    gateway: str,
    every_s: float,
    session: Session,
    gateway_tls: ssl.SSLContext | None = None,
    replica_tls: ssl.SSLContext | None = None,
    names: Collection[str] = (),
) -> web.Application:
    """The page about the cluster behind `gateway`; it looks at it from its start to its end. What gateway and replicas
    must show is as `Peers` has it, and `names` are those of the page as `objection` has them."""
    page = _Page(session, names, lambda: Peers(gateway, gateway_tls, replica_tls), every_s)

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        return await page.guard(request, handler)

    app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[guard])
    app.cleanup_ctx.append(page.look)
    app.add_routes(
        [
            web.get("/", page.file("index.html")),
            web.get("/login", page.file("login.html")),
            *(web.get(f"/{name}", page.file(name)) for name in page.files if not name.endswith(".html")),
            web.get("/view", page.view),
            web.get("/health", page.health),
            web.get("/requests", page.requests),
            web.get("/requests/{id:.+}", page.explain),
            web.patch("/clients/{name:.+}", page.change),
            web.post("/login", page.login),
            web.post("/logout", page.logout),
        ]
    )
    return app


class _Page:
    """Its handlers."""

    _peers: Peers
    _poller: Poller

    def __init__(
        self, session: Session, names: Collection[str], connect: Callable[[], Peers], every_s: float
    ) -> None:
        folder = resources.files(__package__).joinpath("page")
        self.files = {path.name: path.read_bytes() for path in folder.iterdir()}
        self._session, self._names = session, names
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
            response = web.Response(body=self.files[name], content_type=kind, charset="utf-8")
            if name == "index.html" and self._session.needs_key:
                _remember(response, self._session)
            return response

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

    async def login(self, request: web.Request) -> web.Response:
        given = (await request.post()).get("key", "")
        if not isinstance(given, str) or not self._session.is_key(given.strip()):
            raise web.HTTPSeeOther("/login?wrong")
        response = web.Response(status=303, headers={"location": "/"})
        _remember(response, self._session)
        return response

    async def logout(self, _: web.Request) -> web.Response:
        response = web.Response(status=303, headers={"location": "/login"})
        response.del_cookie(self._session.cookie)
        return response

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
        needs_key = self._session.needs_key
        content = FORM if request.path in ("/login", "/logout") else JSON
        why = objection(request.method, request.headers, self._names, is_known=needs_key, content=content)
        if why is not None and request.path != "/health":
            return _error(why, 403)
        may = self._session.may(request.remote, request.headers, request.cookies)
        if request.path not in OPEN and not may:
            if not needs_key:
                return _error("this is for the machine itself", 403)
            if request.path == "/":
                return web.Response(status=303, headers={"location": "/login"})
            return _error("this needs the admin key", 401)
        try:
            return await handler(request)
        except Refused as error:
            return _error(str(error), error.status)


def _remember(response: web.Response, session: Session) -> None:
    response.set_cookie(
        session.cookie, session.issue(), max_age=HOLDS_S, httponly=True, samesite="Strict", path="/",
        secure=session.is_secure,
    )  # fmt: skip


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
