"""The OpenAPI document of a gateway: made of its operations, with the types by which it reads and writes bodies.

Of requests that replicas answer, fields that a type does not name go to the replica, which judges them; its errors are
passed on, with any status from 400 on, in the shape of the API that was asked (`errors.of_replica`).
"""

from collections.abc import Collection, Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from router.gateway import admin, native, pages
from router.gateway.batches.routes import Batches
from router.gateway.errors import AnthropicErrorBody, ErrorBody
from router.gateway.operations import JSON, Operation, operations_of
from router.gateway.record import REQUEST_ID
from router.gateway.request.kinds import (
    ANTHROPIC,
    EMBEDDING,
    KINDS,
    NATIVE,
    TEXT_OR_IDS,
    WITHOUT_ENGINE,
    Kind,
)
from sglang_fair.common import fields
from sglang_fair.common.fields import WIDEST, Facts

Schema = dict[str, Any]

ANSWER = (
    "The replica's answer, whole or, with `stream`, as server-sent events. Sampled answers are not repeatable, not "
    "even with a `seed`, unless the engine is deterministic. A stream whose replica is lost is continued by another "
    "one from the tokens it has: a greedy one in the same words, a sampled one as a sample of the same distribution. "
    "It ends in an `error` event without `[DONE]` if that cannot be done: with logprobs, `n` above 1, tools, a "
    "grammar, or sampling that looks back on its own output (presence and repetition penalties). Streams of "
    "/v1/responses and /v1/messages are not continued, and end in the `error` event of their API."
)

ANSWER_HEADERS = ("x-fair-worker", "x-fair-client", "x-fair-request-id", "x-fair-matched-tokens", REQUEST_ID)

WHOLE: frozenset[Kind] = WITHOUT_ENGINE | EMBEDDING
"""Of these the answer is never a stream."""


class Sender(msgspec.Struct):
    """What a sender's headers may say."""

    client: Annotated[str | None, Meta(description="Who asks.")] = msgspec.field(
        default=None, name="x-fair-client"
    )
    name: Annotated[
        str | None, Meta(description="The sender's name for the request; without one it gets one.")
    ] = msgspec.field(default=None, name=REQUEST_ID)


def _relayed(kind: Kind) -> Operation:
    about = KINDS[kind]
    answer = dict[str, Any] | list[Any] if kind in NATIVE else dict[str, Any]
    return Operation(
        "POST",
        about.path,
        about.summary,
        body=Annotated[about.request, TEXT_OR_IDS] if kind in NATIVE else about.request,
        headers=Sender,
        content={JSON: answer} if kind in WHOLE else {JSON: answer, "text/event-stream": None},
        answer_headers=ANSWER_HEADERS,
        described="The replica's answer." if kind in WHOLE else ANSWER,
        errors=(400, 401, 404, 408, 413, 429, 500, 502, 503),
        error=AnthropicErrorBody if kind in ANTHROPIC else ErrorBody,
    )


OPERATIONS: tuple[Operation, ...] = (
    *map(_relayed, KINDS),
    *operations_of(pages.Public),
    *operations_of(native.Native),
    *operations_of(pages.Private),
    *operations_of(Batches),
    *operations_of(admin.Admin),
    *operations_of(admin.TenantsAdmin),
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


def describe(version: str, paths: Collection[str] | None = None, facts: Facts = WIDEST) -> Schema:
    """The document of a gateway of this version; of `paths` alone, if they are given. `facts` bounds what is sent."""
    types = list({id(kind): kind for one in OPERATIONS for kind in one.types if kind is not None}.values())
    found, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    schemas = {id(kind): schema for kind, schema in zip(types, found, strict=True)}
    for path, kind, *_ in KINDS.values():
        component = components[kind.__name__]
        for field, schema in fields.schemas(path, facts, component.get("required", ())).items():
            known = component["properties"].get(field, {})
            component["properties"][field] = schema | {
                key: known[key] for key in ("description", "default") if key in known
            }
        if path in fields.CLOSED:
            component["properties"] = {key: {} for key in fields.ROUTES[path]} | component["properties"]
            component["additionalProperties"] = {"type": "null"}
    described: dict[str, Schema] = {}
    for one in OPERATIONS:
        if paths is None or one.path in paths:
            described.setdefault(one.path, {})[one.method.lower()] = _described(one, schemas)
    return {
        "openapi": "3.1.0",
        "info": {"title": "sglang-fair gateway", "version": version},
        "components": {"schemas": components},
        "paths": described,
    }


def _described(one: Operation, schemas: Mapping[int, Schema]) -> Schema:
    def media(kind: Any) -> Schema:
        return {} if kind is None else {"schema": schemas[id(kind)]}

    def answer(text: str, kind: Any) -> Schema:
        return {"description": text, "content": {JSON: media(kind)}}

    content: Schema = {**({} if one.answer is None else {JSON: one.answer}), **one.content}
    responses: dict[str, Schema] = {}
    if content:
        responses[str(one.status)] = {
            "description": one.described or one.summary,
            "content": {name: media(kind) for name, kind in content.items()},
            "headers": {
                name: {"schema": {"type": "string"}, "required": True} for name in one.answer_headers
            },
        }
    responses |= {str(status): answer(text, kind) for status, (text, kind) in one.others.items()}
    responses |= {str(status): answer(ERRORS[status], one.error) for status in one.errors}
    places = {"path": one.where, "query": one.query, "header": one.headers}
    described: Schema = {
        "summary": one.summary,
        "responses": responses,
        "parameters": [each for place, kind in places.items() for each in _parameters(kind, place)],
    }
    if one.body is not None:
        described["requestBody"] = {"required": True, "content": {one.sent: media(one.body)}}
    return described


def _parameters(kind: type[msgspec.Struct], place: str) -> list[Schema]:
    """The fields of `kind` as parameters in this place: path, query or header."""
    known = msgspec.json.schema(kind)["$defs"][kind.__name__]["properties"]
    found = []
    for info in msgspec.structs.fields(kind):
        schema = {key: value for key, value in known[info.encode_name].items() if key != "default"}
        options = [one for one in schema.pop("anyOf", ()) if one != {"type": "null"}]
        one: Schema = {"name": info.encode_name, "in": place, "required": place == "path"}
        if (description := schema.pop("description", None)) is not None:
            one["description"] = description
        found.append(one | {"schema": {**schema, **(options[0] if options else {})}})
    return found
