"""Who may see and change the cluster: whoever has the admin key, which no tenant's key replaces. Never a page
of another site in a browser (`common.guard`).

Without a key in `KEY_VARIABLE` and without tenants it is this machine alone: a connection from loopback. With tenants
it is nobody, because a tenant may have a process here too.
"""

import os
from collections.abc import Collection, Mapping

from starlette.middleware import Middleware
from starlette.requests import Request
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from router.gateway.errors import ApiError
from sglang_fair.common import guard
from sglang_fair.common.service_keys import admin_key, is_same

KEY_VARIABLE = admin_key.variable
"""Environment variable. If it is set, calls need `Authorization: Bearer` and its value, wherever they come from."""


def behind_proxy() -> list[Middleware]:
    """For the routes that are guarded: a proxy on this machine is not the caller, its headers say who is."""
    return [
        Middleware(ProxyHeadersMiddleware, trusted_hosts=os.environ.get("FORWARDED_ALLOW_IPS", "127.0.0.1"))
    ]


class Guard:
    """Reads the key when it is made."""

    def __init__(self, *, has_tenants: bool, names: Collection[str] = ()) -> None:
        """`names`: by which the gateway may be asked."""
        self._key = admin_key.key()
        self._has_tenants = has_tenants
        self._names = names

    def check(self, request: Request) -> None:
        """Raises `ApiError` 401 or 403 for who may not."""
        self._check_key(request)
        self.check_site(request, is_known=bool(self._key))

    def check_site(
        self, request: Request, *, is_known: bool = False, content: str | None = guard.JSON
    ) -> None:
        """Raises `ApiError` 403 for another site's page. As `guard.objection` has it."""
        self.check_headers(request.method, request.headers, is_known=is_known, content=content)

    def check_headers(
        self, method: str, headers: Mapping[str, str], *, is_known: bool = False, content: str | None = None
    ) -> None:
        """The same, of a request whose headers alone are there."""
        why = guard.objection(method, headers, self._names, is_known=is_known, content=content)
        if why is not None:
            raise ApiError(403, why, code="forbidden")

    def _check_key(self, request: Request) -> None:
        if self._key:
            scheme, _, given = request.headers.get("authorization", "").partition(" ")
            if not (is_same(given.strip(), self._key) and scheme.lower() == "bearer"):
                bearer = {"www-authenticate": "Bearer"}
                raise ApiError(401, "this needs the admin key", code="unauthorized", headers=bearer)
        elif self._has_tenants:
            raise ApiError(403, f"there is no admin key; set {KEY_VARIABLE}", code="forbidden")
        elif request.client is None or request.client.host not in ("127.0.0.1", "::1"):
            raise ApiError(403, f"this is for the machine itself; set {KEY_VARIABLE}", code="forbidden")
