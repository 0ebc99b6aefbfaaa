"""The OpenAPI document of a gateway: made of its operations, with the types by which it reads and writes bodies."""

from collections.abc import Collection, Mapping
from typing import Annotated, Any, get_args, get_origin

import msgspec

from router.gateway import admin, pages, tenants
from router.gateway.batches import routes as batches
from router.gateway.operations import JSON, Operation, parameters
from router.gateway.relayed import RELAYED, REQUESTS
from router.gateway.request.kinds import PATHS
from sglang_fair.common import fields
from sglang_fair.common.fields import WIDEST, Facts

Schema = dict[str, Any]

OPERATIONS: tuple[Operation, ...] = (
    *RELAYED.values(),
    *pages.OPERATIONS,
    *batches.OPERATIONS,
    *admin.OPERATIONS,
    *tenants.OPERATIONS,
)

ERRORS: Mapping[int, str] = {
    400: "what was sent cannot be understood",
    401: "the key is missing or unknown: a tenant's, where the gateway has tenants, or the admin's",
    403: "this is for the gateway's own machine, or for nobody, because there is no admin key",
    404: "there is no such model, worker, tenant, file, batch, or request that is remembered",
    408: "the body did not arrive in time",
    409: "the name or the address is another worker's; the tenants' file cannot be changed as asked; the router "
    "does not throttle; a batch is over, or still reads the file",
    413: "the body is too large, or the client's files together are",
    429: "too much is in flight, of this client or of all; the cluster is overloaded and the client at its limit "
    "(`throttled_user`, `throttled_app`); or the replica's policy refuses",
    500: "the replica failed at it, and so might another one",
    502: "no replica could serve it to the end",
    503: "no router answers, or it has no replica to send it to; the disk is full",
}


class Parameter(msgspec.Struct, omit_defaults=True):
    """A parameter of an operation."""

    name: str
    place: str = msgspec.field(name="in")
    schema: Schema
    required: bool = False
    description: str = ""


class Response(msgspec.Struct, omit_defaults=True):
    """What may be answered, with one status."""

    description: str
    content: dict[str, Schema] = {}
    headers: dict[str, Schema] = {}


class Described(msgspec.Struct, omit_defaults=True, rename="camel"):
    """An operation, as OpenAPI has it."""

    summary: str
    responses: dict[str, Response]
    parameters: list[Parameter] = []
    request_body: Schema | None = None


class Info(msgspec.Struct):
    """Whose document it is."""

    version: str
    title: str = "sglang-fair gateway"


class Document(msgspec.Struct):
    """An OpenAPI document."""

    info: Info
    components: dict[str, Schema]
    paths: dict[str, dict[str, Described]]
    openapi: str = "3.1.0"


def describe(version: str, paths: Collection[str] | None = None, facts: Facts = WIDEST) -> Schema:
    """The document of a gateway of this version; of `paths` alone, if they are given. `facts` bounds what is sent."""
    types = list({id(kind): kind for one in OPERATIONS for kind in one.types if kind is not None}.values())
    found, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    schemas = {id(kind): schema for kind, schema in zip(types, found, strict=True)}
    for path, (kind, _) in [(PATHS[name], one) for name, one in REQUESTS.items()]:
        bare = get_args(kind)[0] if get_origin(kind) is Annotated else kind
        component = components[bare.__name__]
        for field, schema in fields.schemas(path, facts, component.get("required", ())).items():
            known = component["properties"].get(field, {})
            component["properties"][field] = schema | {
                key: known[key] for key in ("description", "default") if key in known
            }
        if path in fields.CLOSED:
            component["properties"] = {key: {} for key in fields.ROUTES[path]} | component["properties"]
            component["additionalProperties"] = {"type": "null"}
    described: dict[str, dict[str, Described]] = {}
    for one in OPERATIONS:
        if paths is None or one.path in paths:
            described.setdefault(one.path, {})[one.method.lower()] = _described(one, schemas)
    return dict(msgspec.to_builtins(Document(Info(version), {"schemas": components}, described)))


def _described(one: Operation, schemas: Mapping[int, Schema]) -> Described:
    def media(kind: Any) -> Schema:
        return {} if kind is None else {"schema": schemas[id(kind)]}

    answers = {JSON: media(one.answer)} if one.answer is not None else {}
    answers |= {content: media(kind) for content, kind in one.content.items()}
    headers: dict[str, Schema] = {
        name: {"schema": {"type": "string"}, "required": True} for name in one.answer_headers
    }
    responses = {str(one.status): Response(one.described or one.summary, answers, headers)} if answers else {}
    responses |= {
        str(status): Response(text, {JSON: media(kind)}) for status, (text, kind) in one.others.items()
    }
    responses |= {str(status): Response(ERRORS[status], {JSON: media(one.error)}) for status in one.errors}
    places = {"path": one.where, "query": one.query, "header": one.headers}
    return Described(
        one.summary,
        responses,
        [
            msgspec.convert(each, Parameter)
            for place, kind in places.items()
            for each in parameters(kind, place)
        ],
        None if one.body is None else {"required": True, "content": {one.sent: media(one.body)}},
    )
