"""What can be asked of a gateway, as OpenAPI: the paths, what the gateway itself checks, and what it answers.

Only what the gateway checks is given a type. Every other field goes to the replica, which judges it, so its
errors (any 4xx) are relayed as they come. `null` stands for a field that is left out.
"""

from collections.abc import Mapping
from typing import Any

from router.gateway.request.call import MAX_BATCH, MAX_TOKEN_ID

Schema = dict[str, Any]

_TEXT: Schema = {"type": "string"}
_OBJECT: Schema = {"type": "object"}
_COUNT: Schema = {"type": "integer", "minimum": 0, "maximum": 1 << 31}
_IDS: Schema = {
    "type": "array",
    "minItems": 1,
    "items": {"type": "integer", "minimum": 0, "maximum": MAX_TOKEN_ID},
}


def _or_null(schema: Schema) -> Schema:
    return {**schema, "type": [schema["type"], "null"]}


def _object(properties: Mapping[str, Schema], *required: str, **more: Any) -> Schema:
    return {"type": "object", "properties": dict(properties), "required": list(required), **more}


def _one_or_many(*kinds: Schema) -> Schema:
    many = [{"type": "array", "minItems": 1, "maxItems": MAX_BATCH, "items": kind} for kind in kinds]
    return {"anyOf": [*kinds, *many]}


_SAMPLES = _or_null({"type": "integer", "minimum": 1, "maximum": MAX_BATCH})

_ALL: dict[str, Schema] = {
    "stream": _or_null({"type": "boolean"}),
    "stream_options": _or_null(_OBJECT),
    "user": _or_null({**_TEXT, "description": "The client, where neither a header nor an API key names it."}),
    "cache_salt": {"description": "Requests share cached prefixes only with those of the same salt."},
    "extra_key": {"description": "As `cache_salt`."},
    "lora_path": {"description": "The adapter; each has prefixes of its own."},
}

_OPENAI: dict[str, Schema] = {
    "model": _or_null(
        {**_TEXT, "description": "The served model, `default`, or the model, a colon, an adapter."}
    ),
    "n": _SAMPLES,
    "max_tokens": _or_null(_COUNT),
}

_CHAT = _object(
    {
        "messages": {"type": "array", "minItems": 1, "items": _OBJECT},
        "input_ids": _or_null({**_IDS, "description": "The prompt's token ids, if they are known."}),
        "max_completion_tokens": _or_null(_COUNT),
        **_OPENAI,
        **_ALL,
    },
    "messages",
)
_COMPLETION = _object({"prompt": _one_or_many(_TEXT, _IDS), **_OPENAI, **_ALL}, "prompt")
_SAMPLING = _object({"max_new_tokens": _or_null(_COUNT), "n": _SAMPLES})
_GENERATE = _object(
    {
        "sampling_params": {
            "anyOf": [_or_null(_SAMPLING), {"type": "array", "minItems": 1, "items": _SAMPLING}]
        },
        **_ALL,
    },
    anyOf=[
        _object({"text": _one_or_many(_TEXT)}, "text"),
        _object({"input_ids": _one_or_many(_IDS), "text": {"type": "null"}}, "input_ids"),
    ],
)

_ERROR = _object(
    {
        "error": _object(
            {"message": _TEXT, "type": _TEXT, "param": {}, "code": {"type": ["string", "integer"]}},
            "message",
            "type",
            "code",
        )
    },
    "error",
)
_WORKER = _object(
    {
        "name": _TEXT,
        "state": {"enum": ["up", "draining", "sick", "gone"]},
        "url": _TEXT,
        "kv": _or_null(_TEXT),
        "replay": _or_null(_TEXT),
        "capacity": {"type": "number", "exclusiveMinimum": 0},
    },
    "name",
    "state",
)
_NAME: Schema = {"type": "string", "pattern": "^[A-Za-z0-9._:-]{1,64}$"}
_ADDRESS: Schema = {"type": "string", "pattern": "^[a-z]+://[!-~]+$"}
_NEW_WORKER = _object(
    {
        "url": {"type": "string", "pattern": "^https?://[!-.0-~]+/?$"},
        "name": _or_null(_NAME),
        "kv": _or_null({**_ADDRESS, "description": "ZMQ address of its KV events."}),
        "replay": _or_null({**_ADDRESS, "description": "Where they are replayed; needs `kv`."}),
        "capacity": {"type": "number", "exclusiveMinimum": 0},
    },
    "url",
    additionalProperties=False,
    anyOf=[_object({"replay": {"type": "null"}}), _object({"kv": _TEXT}, "kv")],
)

_JSON = "application/json"

_ERRORS = {
    "400": "what was sent cannot be understood",
    "401": "the admin key is missing",
    "403": "this is for the gateway's own machine",
    "404": "there is no such model or worker",
    "408": "the body did not arrive in time",
    "409": "the name or the address is another worker's",
    "413": "the body is too large",
    "429": "too much is in flight, of this client or of all; or the replica's policy refuses",
    "502": "no replica could serve it to the end",
    "503": "no router answers, or it has no replica to send it to",
}
_RELAYED = ("400", "404", "408", "413", "429", "502", "503")
_ADMIN = ("400", "401", "403", "404", "409", "413", "503")


def _json(description: str, schema: Schema) -> Schema:
    return {"description": description, "content": {_JSON: {"schema": schema}}}


def _errors(*statuses: str) -> dict[str, Schema]:
    return {status: _json(_ERRORS[status], _ERROR) for status in statuses}


def _served(what: str, body: Schema) -> Schema:
    """A route whose requests replicas answer."""
    headers = ("x-fair-worker", "x-fair-client", "x-fair-request-id", "x-fair-matched-tokens")
    answer: Schema = {
        "description": "The replica's answer, in a piece, or as server-sent events with `stream`.",
        "headers": {name: {"schema": _TEXT, "required": True} for name in headers},
        "content": {_JSON: {"schema": {"type": ["object", "array"]}}, "text/event-stream": {}},
    }
    client = {"name": "x-fair-client", "in": "header", "schema": _TEXT, "description": "Who asks."}
    return {
        "post": {
            "summary": what,
            "parameters": [client],
            "requestBody": {"required": True, "content": {_JSON: {"schema": body}}},
            "responses": {"200": answer, **_errors(*_RELAYED)},
        }
    }


def _told(what: str, schema: Schema, *errors: str, status: str = "200", **more: Any) -> Schema:
    """An operation that the gateway answers itself."""
    return {"summary": what, "responses": {status: _json(what, schema), **_errors(*errors)}, **more}


def describe(version: str) -> Schema:
    """The document of a gateway of this version."""
    model = _object({"id": _TEXT, "object": {"const": "model"}}, "id", "object")
    health = _object({"status": {"enum": ["ok", "fallback", "no router"]}, "model": _TEXT}, "status", "model")
    state = _object(
        {"workers": _OBJECT, "in_flight": {"type": "integer"}, "gateway": _OBJECT}, "workers", "gateway"
    )
    unhealthy = {"503": _json("requests cannot be placed", health)}
    named = {"name": "name", "in": "path", "required": True, "schema": _NAME}
    added = {"requestBody": {"required": True, "content": {_JSON: {"schema": _NEW_WORKER}}}}
    healthy = _told("Whether requests can be placed.", health)
    return {
        "openapi": "3.1.0",
        "info": {"title": "sglang-fair gateway", "version": version},
        "paths": {
            "/v1/chat/completions": _served("Answer a chat.", _CHAT),
            "/v1/completions": _served("Go on with a prompt.", _COMPLETION),
            "/generate": _served("SGLang's own interface.", _GENERATE),
            "/v1/models": {
                "get": _told(
                    "The one model that is served.",
                    _object(
                        {"object": {"const": "list"}, "data": {"type": "array", "items": model}},
                        "object",
                        "data",
                    ),
                )
            },
            "/health": {"get": healthy | {"responses": healthy["responses"] | unhealthy}},
            "/status": {"get": _told("The router's snapshot, and this gateway's counters.", state)},
            "/workers": {
                "get": _told(
                    "The replicas.",
                    _object({"workers": {"type": "array", "items": _WORKER}}, "workers"),
                    *_ADMIN,
                ),
                "post": _told("Add a replica.", _WORKER, *_ADMIN, status="201", **added),
            },
            "/workers/{name}": {
                "delete": _told("Drain a replica, then forget it.", _WORKER, *_ADMIN, parameters=[named])
            },
        },
    }
