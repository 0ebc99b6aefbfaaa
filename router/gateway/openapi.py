"""The OpenAPI document of a gateway: its paths, with the types by which it reads and writes bodies.

Fields that a type does not name go to the replica, which judges them; its errors (any 4xx) are passed on as they come.
"""

from collections.abc import Collection, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from router.batches.model import BATCH_PATTERN, FILE_PATTERN
from router.gateway.admin import (
    NAME_PATTERN,
    NewLimits,
    NewSwap,
    NewWorker,
    SwapState,
    ThrottleReport,
    WorkerList,
    WorkerState,
)
from router.gateway.batches.schema import BatchList, BatchObject, FileDeleted, FileList, FileObject, NewBatch
from router.gateway.errors import AnthropicErrorBody, ErrorBody
from router.gateway.explain import Explained, Latest
from router.gateway.pages import MOST_LATEST, HealthReport, Liveness, Model, Models, Readiness, StatusReport
from router.gateway.record import REQUEST_ID
from router.gateway.request.kinds import ANTHROPIC, PATHS, Kind
from router.gateway.request.schema import (
    ChatRequest,
    CompletionRequest,
    CountTokensRequest,
    DetokenizeRequest,
    DocumentedGenerateRequest,
    DocumentedTokenizeRequest,
    EmbeddingsRequest,
    MessagesRequest,
    ResponsesRequest,
)
from router.gateway.tenants import TenantChange, TenantState
from router.gateway.usage import UsageReport
from sglang_fair.tenants.model import NAME_PATTERN as TENANT_PATTERN

Schema = dict[str, Any]

DocumentedNewWorker = Annotated[
    NewWorker,
    Meta(
        extra_json_schema={
            "anyOf": [
                {"properties": {"replay": {"type": "null"}}},
                {"required": ["kv"], "properties": {"kv": {"type": "string"}}},
            ]
        }
    ),
]
"""With the rule that `replay` needs `kv`, which a type cannot say."""

REQUESTS: dict[Kind, tuple[Any, str]] = {
    "chat": (ChatRequest, "Answer a chat."),
    "completions": (CompletionRequest, "Continue a prompt."),
    "generate": (DocumentedGenerateRequest, "SGLang's own interface."),
    "responses": (ResponsesRequest, "Answer in OpenAI's Responses API. Nothing is stored."),
    "messages": (MessagesRequest, "Answer in Anthropic's Messages API."),
    "embeddings": (EmbeddingsRequest, "Embed texts, where the model can."),
    "count_tokens": (CountTokensRequest, "Count the tokens of a request to /v1/messages."),
    "tokenize": (DocumentedTokenizeRequest, "The token ids of texts, or of a chat."),
    "detokenize": (DetokenizeRequest, "The texts of token ids."),
}

ERRORS = {
    "400": "what was sent cannot be understood",
    "401": "the key is missing or unknown: a tenant's, where the gateway has tenants, or the admin's",
    "403": "this is for the gateway's own machine, or for nobody, because there is no admin key",
    "404": "there is no such model, worker, tenant, file, batch, or request that is remembered",
    "408": "the body did not arrive in time",
    "409": "the name or the address is another worker's; the tenants' file cannot be changed as asked; the router "
    "does not throttle; a batch is over, or still reads the file",
    "413": "the body is too large, or the client's files together are",
    "429": "too much is in flight, of this client or of all; the cluster is overloaded and the client at its limit "
    "(`throttled_user`, `throttled_app`); or the replica's policy refuses",
    "502": "no replica could serve it to the end",
    "503": "no router answers, or it has no replica to send it to; the disk is full",
}
RELAY_ERRORS = ("400", "401", "404", "408", "413", "429", "502", "503")
TENANT_ERRORS = ("400", "401", "403", "404", "409", "413")
FILE_ERRORS = ("400", "401", "404", "408", "409", "413", "429", "503")
ADMIN_ERRORS = ("400", "401", "403", "404", "409", "413", "503")

ANSWER = (
    "The replica's answer, whole or, with `stream`, as server-sent events. Sampled answers are not repeatable, not "
    "even with a `seed`, unless the engine is deterministic. A stream whose replica is lost is continued by another "
    "one: a greedy one in the same words, a sampled one from the tokens it has, as a sample of the same distribution. "
    "It ends in an `error` event without `[DONE]` if that cannot be done: with logprobs, `n` above 1, tools, a "
    "grammar, or sampling that looks back on its own output (presence and repetition penalties). Streams of "
    "/v1/responses and /v1/messages are not continued, and end in the `error` event of their API."
)


def describe(version: str, paths: Collection[str] | None = None) -> Schema:
    """The document of a gateway of this version; of `paths` alone, if they are given."""
    types = (
        *(request for request, _ in REQUESTS.values()),
        DocumentedNewWorker,
        *(
            WorkerState,
            WorkerList,
            NewLimits,
            NewSwap,
            SwapState,
            ThrottleReport,
            Model,
            Models,
            HealthReport,
            Liveness,
            Readiness,
            StatusReport,
            UsageReport,
            Explained,
            Latest,
            ErrorBody,
            AnthropicErrorBody,
            TenantChange,
            TenantState,
            FileObject,
            FileList,
            FileDeleted,
            NewBatch,
            BatchObject,
            BatchList,
        ),
    )
    references, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    document = _Document(dict(zip(types, references, strict=True))).assemble(version, components)
    if paths is not None:
        document["paths"] = {path: one for path, one in document["paths"].items() if path in paths}
    return document


class _Document:
    """Builds the document; `schemas` are references to the types."""

    def __init__(self, schemas: dict[Any, Schema]) -> None:
        self._schemas = schemas

    def assemble(self, version: str, components: Schema) -> Schema:
        name = {"name": "name", "in": "path", "required": True, "schema": _text(NAME_PATTERN)}
        model_id = {"name": "id", "in": "path", "required": True, "schema": _text()}
        request_id = {"name": "id", "in": "path", "required": True, "schema": _text()}
        add_worker = self._answered("Add a replica.", WorkerState, ADMIN_ERRORS, status="201")
        tenant = {"name": "name", "in": "path", "required": True, "schema": _text(TENANT_PATTERN)}
        change_tenant = self._answered(
            "Change a tenant's weight, in the tenants' file.", TenantState, TENANT_ERRORS, parameters=[tenant]
        )
        return {
            "openapi": "3.1.0",
            "info": {"title": "sglang-fair gateway", "version": version},
            "components": {"schemas": components},
            "paths": {
                **{PATHS[kind]: {"post": self._relayed(kind, *REQUESTS[kind])} for kind in PATHS},
                "/v1/models": {
                    "get": self._answered("The models that the sender may ask for.", Models, ("401",))
                },
                "/v1/models/{id}": {
                    "get": self._answered(
                        "A model by its name.", Model, ("401", "404"), parameters=[model_id]
                    )
                },
                "/v1/usage": {
                    "get": self._answered(
                        "What the sender has had, what it may have, and what is left.", UsageReport, ("401",)
                    )
                },
                "/v1/responses/{id}": {
                    method: {
                        "summary": "A stored response, of which there are none.",
                        "parameters": [model_id],
                        "responses": self._errors(("401", "404")),
                    }
                    for method in ("get", "delete")
                },
                "/v1/responses/{id}/cancel": {
                    "post": {
                        "summary": "Cancel a response in the background, of which there are none.",
                        "parameters": [model_id],
                        "responses": self._errors(("401", "404")),
                    }
                },
                **self._batches(),
                "/requests": {
                    "get": self._answered(
                        "The requests that came last to this process, the latest first.",
                        Latest,
                        ("400", "401", "403"),
                        parameters=[
                            {"name": "client", "in": "query", "schema": _text()},
                            {
                                "name": "limit",
                                "in": "query",
                                "schema": {"type": "integer", "minimum": 1, "maximum": MOST_LATEST},
                            },
                        ],
                    )
                },
                "/explain/{id}": {
                    "get": self._answered(
                        "Why a request was served as it was: what gateway, router and replica remember. By the "
                        "id in its answer, x-request-id or x-fair-request-id; a tenant sees its own.",
                        Explained,
                        ("401", "403", "404"),
                        parameters=[request_id],
                    )
                },
                "/health": {"get": self._health()},
                "/healthz": {"get": self._answered("Whether the process answers.", Liveness)},
                "/readyz": {"get": self._readyz()},
                "/status": {
                    "get": self._answered(
                        "The router's snapshot, and this gateway's counters.", StatusReport, ("401", "403")
                    )
                },
                "/metrics": {"get": self._metrics()},
                "/swap": {
                    "post": self._answered(
                        "Have a replica load another model.", SwapState, ADMIN_ERRORS, status="202"
                    )
                    | {"requestBody": self._body(NewSwap)},
                },
                "/limits": {
                    "get": self._answered("How calls are throttled.", ThrottleReport, ADMIN_ERRORS),
                    "post": self._answered("Replace the limits of throttling.", ThrottleReport, ADMIN_ERRORS)
                    | {"requestBody": self._body(NewLimits)},
                },
                "/workers": {
                    "get": self._answered("The replicas.", WorkerList, ADMIN_ERRORS),
                    "post": add_worker | {"requestBody": self._body(DocumentedNewWorker)},
                },
                "/workers/{name}": {
                    "delete": self._answered(
                        "Drain a replica, then forget it.", WorkerState, ADMIN_ERRORS, parameters=[name]
                    )
                },
                "/tenants/{name}": {"patch": change_tenant | {"requestBody": self._body(TenantChange)}},
            },
        }

    def _batches(self) -> Schema:
        """Files and batches."""
        name = {"name": "id", "in": "path", "required": True, "schema": _text(FILE_PATTERN)}
        batch = name | {"schema": _text(BATCH_PATTERN)}
        after = {
            "name": "after",
            "in": "query",
            "schema": _text(),
            "description": "The last of the page before.",
        }
        upload = {
            "type": "object",
            "required": ["file", "purpose"],
            "properties": {
                "file": {"type": "string", "format": "binary", "description": "A request a line, in JSON."},
                "purpose": {"type": "string", "enum": ["batch"]},
            },
            "additionalProperties": False,
        }
        purpose = {"name": "purpose", "in": "query", "schema": {"enum": ["batch", "batch_output"]}}
        order = {"name": "order", "in": "query", "schema": {"enum": ["asc", "desc"]}}
        content = {"description": "The file.", "content": {"application/octet-stream": {}}}
        return {
            "/v1/files": {
                "post": self._answered("Upload the requests of a batch.", FileObject, FILE_ERRORS)
                | {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": upload}}}},
                "get": self._answered(
                    "The sender's files.",
                    FileList,
                    FILE_ERRORS,
                    parameters=[after, _limit(10_000), purpose, order],
                ),
            },
            "/v1/files/{id}": {
                "get": self._answered("A file.", FileObject, FILE_ERRORS, parameters=[name]),
                "delete": self._answered("Delete a file.", FileDeleted, FILE_ERRORS, parameters=[name]),
            },
            "/v1/files/{id}/content": {
                "get": {
                    "summary": "What is in a file.",
                    "parameters": [name],
                    "responses": {"200": content, **self._errors(FILE_ERRORS)},
                }
            },
            "/v1/batches": {
                "post": self._answered("Have the requests of a file answered.", BatchObject, FILE_ERRORS)
                | {"requestBody": self._body(NewBatch)},
                "get": self._answered(
                    "The sender's batches.", BatchList, FILE_ERRORS, parameters=[after, _limit(100)]
                ),
            },
            "/v1/batches/{id}": {
                "get": self._answered("A batch.", BatchObject, FILE_ERRORS, parameters=[batch])
            },
            "/v1/batches/{id}/cancel": {
                "post": self._answered(
                    "Answer no more of a batch's requests.", BatchObject, FILE_ERRORS, parameters=[batch]
                )
            },
        }

    def _relayed(self, kind: Kind, request: Any, summary: str) -> Schema:
        """An operation that a replica answers."""
        headers = ("x-fair-worker", "x-fair-client", "x-fair-request-id", "x-fair-matched-tokens", REQUEST_ID)
        answer: Schema = {
            "description": ANSWER,
            "headers": {name: {"schema": _text(), "required": True} for name in headers},
            "content": {
                "application/json": {"schema": {"type": ["object", "array"]}},
                "text/event-stream": {},
            },
        }
        client = {"name": "x-fair-client", "in": "header", "schema": _text(), "description": "Who asks."}
        name = {
            "name": REQUEST_ID,
            "in": "header",
            "schema": _text(),
            "description": "The sender's name for the request; without one it gets one.",
        }
        return {
            "summary": summary,
            "parameters": [client, name],
            "requestBody": self._body(request),
            "responses": {
                "200": answer,
                **self._errors(RELAY_ERRORS, AnthropicErrorBody if kind in ANTHROPIC else ErrorBody),
            },
        }

    def _answered(
        self, summary: str, answer: Any, errors: Sequence[str] = (), *, status: str = "200", **more: Any
    ) -> Schema:
        """An operation that the gateway answers itself."""
        responses = {status: self._json(summary, answer), **self._errors(errors)}
        return {"summary": summary, "responses": responses, **more}

    def _health(self) -> Schema:
        operation = self._answered("Whether requests can be placed.", HealthReport)
        operation["responses"]["503"] = self._json("requests cannot be placed", HealthReport)
        return operation

    def _readyz(self) -> Schema:
        operation = self._answered("Whether requests may be sent here.", Readiness)
        operation["responses"]["503"] = self._json(
            "requests cannot be placed, or it is about to end", Readiness
        )
        return operation

    def _metrics(self) -> Schema:
        page = {"description": "Numbers for Prometheus.", "content": {"text/plain": {"schema": _text()}}}
        return {"summary": page["description"], "responses": {"200": page, **self._errors(("401", "403"))}}

    def _body(self, request: Any) -> Schema:
        return {"required": True, "content": {"application/json": {"schema": self._schemas[request]}}}

    def _errors(self, statuses: Sequence[str], body: Any = ErrorBody) -> Schema:
        return {status: self._json(ERRORS[status], body) for status in statuses}

    def _json(self, description: str, answer: Any) -> Schema:
        return {
            "description": description,
            "content": {"application/json": {"schema": self._schemas[answer]}},
        }


def _limit(most: int) -> Schema:
    return {"name": "limit", "in": "query", "schema": {"type": "integer", "minimum": 1, "maximum": most}}


def _text(pattern: str | None = None) -> Schema:
    return {"type": "string"} if pattern is None else {"type": "string", "pattern": pattern}
