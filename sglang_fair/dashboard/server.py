"""The page and what it asks for, over HTTP.

GET /                     the page                    POST /login, POST /logout     the admin key for a cookie
GET /view?span=10+min     what to show, as JSON       GET /health                   for whoever waits for the start
GET /requests?client=     the last requests           GET /requests/ID              why one waited
PATCH /clients/NAME       {"weight": 2}: a change that the operator wants
"""

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from importlib import resources
from typing import Any

from aiohttp import web

from sglang_fair.cluster.explain import in_words
from sglang_fair.common.guard import FORM, JSON, objection
from sglang_fair.dashboard.model import SPANS
from sglang_fair.dashboard.peers import Peers, Poller, Refused
from sglang_fair.dashboard.session import HOLDS_S, Session

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
    files = {path.name: path.read_bytes() for path in resources.files(__package__).joinpath("page").iterdir()}
    pollers: list[tuple[Poller, Peers]] = []

    async def looking(_: web.Application) -> AsyncIterator[None]:
        peers = Peers(gateway, gateway_tls, replica_tls)
        poller = Poller(peers, every_s)
        pollers.append((poller, peers))
        task = asyncio.create_task(poller.run())
        yield
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await peers.close()

    def file(name: str) -> Handler:
        kind = TYPES["." + name.rpartition(".")[2]]

        async def send(request: web.Request) -> web.Response:
            response = web.Response(body=files[name], content_type=kind, charset="utf-8")
            if name == "index.html" and session.needs_key:
                _remember(response, session)
            return response

        return send

    async def view(request: web.Request) -> web.Response:
        span = request.query.get("span", next(iter(SPANS)))
        if span not in SPANS:
            raise Refused(f"there is no span {span!r:.40}; there are {', '.join(SPANS)}", 400)
        return web.Response(body=pollers[0][0].encoded(span), content_type="application/json")

    async def health(_: web.Request) -> web.Response:
        return web.Response(text="ok")

    async def requests(request: web.Request) -> web.Response:
        try:
            found = await pollers[0][1].requests(request.query.get("client"), MOST_REQUESTS)
        except Refused as error:  # a state to show, as others: no error of this page
            found = {"requests": [], "kept": error.status != 404, "said": f"No data: {error}."}
        return web.json_response(found)

    async def explain(request: web.Request) -> web.Response:
        answer = await pollers[0][1].explain(request.match_info["id"])
        return web.json_response({"text": in_words(answer)})

    async def change(request: web.Request) -> web.Response:
        weight = _weight(await request.read())
        await pollers[0][1].set_weight(request.match_info["name"], weight)
        return web.json_response({"weight": weight})

    async def login(request: web.Request) -> web.Response:
        given = (await request.post()).get("key", "")
        if not isinstance(given, str) or not session.is_key(given.strip()):
            raise web.HTTPSeeOther("/login?wrong")
        response = web.Response(status=303, headers={"location": "/"})
        _remember(response, session)
        return response

    async def logout(_: web.Request) -> web.Response:
        response = web.Response(status=303, headers={"location": "/login"})
        response.del_cookie(session.cookie)
        return response

    app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[_guarded(session, names)])
    app.cleanup_ctx.append(looking)
    app.add_routes(
        [
            web.get("/", file("index.html")),
            web.get("/login", file("login.html")),
            *(web.get(f"/{name}", file(name)) for name in files if not name.endswith(".html")),
            web.get("/view", view),
            web.get("/health", health),
            web.get("/requests", requests),
            web.get("/requests/{id:.+}", explain),
            web.patch("/clients/{name:.+}", change),
            web.post("/login", login),
            web.post("/logout", logout),
        ]
    )
    return app


def _guarded(session: Session, names: Collection[str]) -> Any:
    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            response = await _answer(request, handler)
        except web.HTTPException as error:
            response = error
        response.headers.update(HEADERS)
        if isinstance(response, web.HTTPException):
            raise response
        return response

    async def _answer(request: web.Request, handler: Handler) -> web.StreamResponse:
        may = session.may(request.remote, request.headers, request.cookies)
        why = objection(
            request.method, request.headers, names, is_known=session.needs_key,
            content=FORM if request.path in ("/login", "/logout") else JSON,
        )  # fmt: skip
        if why is not None and request.path != "/health":
            return _error(why, 403)
        if request.path not in OPEN and not may:
            if request.path == "/" and session.needs_key:
                return web.Response(status=303, headers={"location": "/login"})
            return _error("this needs the admin key" if session.needs_key else "this is for the machine itself",
                          401 if session.needs_key else 403)  # fmt: skip
        try:
            return await handler(request)
        except Refused as error:
            return _error(str(error), error.status)

    return guard


def _remember(response: web.Response, session: Session) -> None:
    response.set_cookie(
        session.cookie, session.issue(), max_age=HOLDS_S, httponly=True, samesite="Strict", path="/",
        secure=session.is_secure,
    )  # fmt: skip


def _weight(body: bytes) -> float:
    """The weight in a body. Raises `Refused`."""
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
