"""A tenant's weight, changed while the gateway runs: `PATCH /tenants/NAME`.

It is written into the tenants' file, so every gateway that reads the file obeys it, and a restart forgets nothing.
"""

import asyncio
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from router.gateway.admin import read_body
from router.gateway.errors import ApiError
from router.gateway.guard import Guard
from router.gateway.operations import Operation
from router.gateway.pages import json_response
from sglang_fair.common.weights import MOST_WEIGHT
from sglang_fair.settings.setting import SettingError
from sglang_fair.tenants import edit
from sglang_fair.tenants.model import NAME_PATTERN


class TenantChange(msgspec.Struct, forbid_unknown_fields=True):
    """The body of `PATCH /tenants/NAME`."""

    weight: Annotated[
        float, Meta(ge=1 / MOST_WEIGHT, le=MOST_WEIGHT, description="Its share beside the others'.")
    ]


class TenantState(msgspec.Struct):
    """A tenant, as the file has it."""

    name: str
    weight: float


class TenantName(msgspec.Struct):
    """Which tenant."""

    name: Annotated[str, Meta(pattern=NAME_PATTERN)]


CHANGE = Operation(
    "PATCH",
    "/tenants/{name}",
    "Change a tenant's weight, in the tenants' file.",
    TenantState,
    (400, 401, 403, 404, 409, 413),
    body=TenantChange,
    where=TenantName,
    has_slashes=True,
)
OPERATIONS = (CHANGE,)


def routes(path: Path, guard: Guard) -> list[Route]:
    """The route. It raises `ApiError`."""

    async def change(request: Request) -> Response:
        guard.check(request)
        name = request.path_params["name"]
        try:
            asked = msgspec.json.decode(await read_body(request), type=TenantChange)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise ApiError(400, f"not a change of a tenant: {error}", code="invalid_tenant") from error
        try:
            await asyncio.to_thread(edit.set_weight, path, name, asked.weight)
        except edit.NoSuchTenant as error:
            raise ApiError(404, str(error), code="tenant_not_found") from error
        except (edit.CannotEdit, SettingError, OSError) as error:
            raise ApiError(
                409, f"the tenants' file cannot be changed: {error}", code="tenants_file"
            ) from error
        return json_response(TenantState(name, asked.weight))

    return [CHANGE.route(change)]
