"""The application: what is asked of replicas, and the gateway's own pages."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Lifespan, Receive, Scope, Send

from router.batches.model import StoreError
from router.gateway import logs, pages
from router.gateway.address import Address
from router.gateway.admin import Admin, TenantsAdmin
from router.gateway.batches.routes import Batches
from router.gateway.errors import ApiError
from router.gateway.gateway import Gateway
from router.gateway.guard import Guard, behind_proxy
from router.gateway.listener import RELAY, STATE, ClientRequest, Listener
from router.gateway.native import Native
from router.gateway.openapi import describe
from router.gateway.operations import routes_of
from router.gateway.relay import Relay
from router.gateway.request.kinds import PATHS, Kind
from router.gateway.settings import facts
from router.process import collect_seldom
from sglang_fair.common.fields import WIDEST, Facts
from sglang_fair.common.guard import named
from sglang_fair.common.processes import die_with_parent
from sglang_fair.common.version import VERSION
from sglang_fair.settings import table
from sglang_fair.settings.setting import SettingError

SETTINGS_VARIABLE = "SGLANG_FAIR_GATEWAY"
"""Where uvicorn's worker processes find their settings, in JSON: they are started by import string."""


class Pages(Starlette):
    """What the gateway answers itself at one address, and its documentation at /openapi.json."""

    def __init__(
        self,
        gateway: Gateway,
        routes: Sequence[Route],
        relayed: Sequence[str] = (),
        facts: Facts = WIDEST,
        lifespan: Lifespan[Any] | None = None,
    ) -> None:
        """`relayed` are paths of the same address that replicas answer; `facts` is what clients may ask of these."""
        self._facts = facts

        async def refuse(request: Request, error: Exception) -> Response:
            if isinstance(error, HTTPException):  # no such route, or not with this method
                error = ApiError(error.status_code, str(error.detail))
            assert isinstance(error, ApiError)
            return refused(gateway, request.url.path, error)

        async def openapi(_: Request) -> Response:
            return JSONResponse(self.openapi())

        super().__init__(
            routes=[*routes, Route("/openapi.json", openapi)],
            exception_handlers={ApiError: refuse, HTTPException: refuse},
            lifespan=lifespan,
        )
        self._paths = {*relayed, *(route.path.replace(":path", "") for route in routes)}

    def openapi(self) -> dict[str, Any]:
        """The document of this address, which is made from our own types."""
        return describe(VERSION, self._paths, self._facts)


def refused(gateway: Gateway, path: str, error: ApiError) -> Response:
    """The answer to a request that is refused, in the shape of the API that was asked."""
    gateway.metrics.count("refusals_total", str(error.status))
    return error.answer("anthropic" if path.startswith(PATHS["messages"]) else "openai")


class App:
    """The application: by ASGI for the gateway's own pages, and `relay` for requests that replicas answer."""

    def __init__(
        self,
        gateway: Gateway,
        routes: Sequence[Route],
        admin: Address | None = None,
        batches: Batches | None = None,
        guard: Guard | None = None,
    ) -> None:
        """`routes` are those of the clients' address, `admin` is where operators ask, if that is an address of its own.
        `batches` are closed at the end. `guard` keeps other sites' pages from what clients may ask; None: clients have
        keys."""

        @asynccontextmanager
        async def lifespan(_: Starlette) -> AsyncIterator[dict[str, object]]:
            await gateway.start()
            counting = None
            if batches is not None:
                counting = asyncio.create_task(batches.follow(gateway.hear_of_batches))
            try:
                if admin is not None:
                    await admin.start()
                if gateway.settings.notice_s > 0:
                    give_notice(gateway, gateway.settings.notice_s)
                yield {STATE: gateway.connection_bounds, RELAY: self.relay}
            finally:
                if admin is not None:
                    await admin.close()
                await gateway.close()
                if batches is not None and counting is not None:
                    counting.cancel()
                    batches.close()

        self.gateway, self.batches = gateway, batches
        self.pages = Pages(gateway, routes, tuple(PATHS.values()), facts(gateway.settings), lifespan)
        self._guard = guard

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if self._guard is not None and scope["type"] == "http" and path.startswith("/v1/"):
            try:
                self._guard.check_site(Request(scope), content=None)
            except ApiError as error:
                await refused(self.gateway, path, error)(scope, receive, send)
                return
        await self.pages(scope, receive, send)

    async def relay(self, kind: Kind, request: ClientRequest) -> None:
        """Has a replica answer the request."""
        if self._guard is not None:
            try:
                self._guard.check_headers(request.method, request.headers)
            except ApiError as error:
                answer = refused(self.gateway, PATHS[kind], error)
                await request.answer(answer.status_code, dict(answer.headers), bytes(answer.body))
                return
        await Relay(kind, self.gateway, request).run()


def give_notice(gateway: Gateway, notice_s: float) -> None:
    """SIGTERM in two steps: first load balancers are told, then the server stops. From the signal on /readyz says 503,
    and everything is served as before; after `notice_s` the signal goes to its handler of before, uvicorn's, which
    accepts nothing more and lets open requests end. A second SIGTERM goes there at once. Call it in the main thread,
    in the running loop."""
    before = signal.getsignal(signal.SIGTERM)
    if not callable(before):
        return
    stop: Callable[[int, FrameType | None], object] = before
    loop = asyncio.get_running_loop()

    def end(number: int, frame: FrameType | None) -> None:
        if gateway.is_ending:
            stop(number, frame)
            return
        gateway.is_ending = True
        loop.call_soon_threadsafe(loop.call_later, notice_s, stop, number, None)

    signal.signal(signal.SIGTERM, end)


def create_app(settings: table.Gateway) -> App:
    """The application. Reads tokenizers and tenants, and opens the folder of batches, at once; raises `TokenizerError`
    and SettingError if it cannot."""
    gateway = Gateway(settings)
    batches = open_batches(gateway, settings)
    guard = Guard(has_tenants=settings.tenants is not None, names=named(settings.names))
    public = [*routes_of(pages.Public(gateway)), *(() if batches is None else routes_of(batches))]
    native = Native(gateway)
    public += routes_of(native, guard.check_site) if settings.tenants is None else routes_of(native)
    private, workers = pages.Private(gateway), Admin(gateway.link, gateway.replicas, gateway.names)
    if settings.tenants is None and settings.admin_port is None:
        public += routes_of(private, guard.check_site, behind_proxy())
        public += routes_of(workers, guard.check, behind_proxy())
        return App(gateway, public, None, batches, guard)
    owners: list[object] = [private, workers]
    if settings.tenants is not None:
        public += routes_of(pages.OfTenants(gateway))
        owners.append(TenantsAdmin(Path(settings.tenants)))
    address = None if settings.admin_port is None else operators_address(gateway, guard, owners)
    # With tenants each request shows a key, which no page has.
    return App(gateway, public, address, batches, guard if settings.tenants is None else None)


def operators_address(
    gateway: Gateway, guard: Guard, owners: Sequence[object], open_to_all: Sequence[Route] = ()
) -> Address:
    """That of --admin-port, with the pages of `owners`, and others that are not guarded."""
    guarded = [route for owner in owners for route in routes_of(owner, guard.check, behind_proxy())]
    routes = [*open_to_all, *guarded]
    connection = partial(Listener, bounds=gateway.operators_bounds)
    return Address(Pages(gateway, routes), gateway.settings, connection)


def open_batches(gateway: Gateway, settings: table.Gateway) -> Batches | None:
    """What the gateway keeps of batches, if it has any. Raises SettingError, in one line."""
    try:
        return None if settings.batches is None else Batches(gateway, settings)
    except StoreError as error:
        raise SettingError(f"--batches: {error}", "batches") from None


def create_app_from_environment() -> App:
    die_with_parent()
    settings = msgspec.json.decode(os.environ[SETTINGS_VARIABLE], type=table.Gateway)
    logs.configure(settings.log_level, settings.log_format)
    app = create_app(settings)
    collect_seldom()
    return app
