"""The gateway is as its OpenAPI document says: Schemathesis asks for all that may be asked, and for what may not.

The engines are stand-ins, which take whatever reaches them; so what is refused is refused by the gateway.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from anyio.from_thread import start_blocking_portal
from hypothesis import HealthCheck, given, settings
from schemathesis import Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.schemas import APIOperation
from schemathesis.specs.openapi import checks

from router.gateway.app import create_app
from router.gateway.guard import KEY_VARIABLE
from router.gateway.openapi import describe
from router.gateway.request.call import Names
from router.gateway.request.kinds import PATHS
from router.gateway.request.parse import parse
from tests.gateway.clusters import Cluster, add_tenant, cluster, gateway_settings, stand_ins
from tests.support.apis import BODIES
from tests.support.budget import examples
from tests.support.ports import free_port
from tests.support.stand_in import MODEL, Server
from tests.support.waiting import DEADLINE_S

OPERATIONS = [found.ok() for found in schemathesis.openapi.from_dict(describe("1")).get_all_operations()]
REFUSABLE = [
    one
    for one in OPERATIONS
    if (one.body or (one.path_parameters and one.method != "get"))
    and one.label != "POST /v1/files"
    and not one.path.startswith("/v1/responses/")
]
"""Any bytes are a file, and any name is one of a response that is not there: nothing is to be refused."""
CONFORMS = (
    not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
)
EXAMPLES = 25
LIMITS = ("max_tokens", "max_completion_tokens", "max_new_tokens", "max_output_tokens")
MOST_TOKENS = 4
KEY, ADMIN_KEY = "the key of gold", "the admin's key"
URL = re.compile("https?://[!-.0-~]+/?")


def test_the_document_has_every_route(tokenizer: Path, tmp_path: Path) -> None:
    app = create_app(gateway_settings("tcp://127.0.0.1:1", tokenizer, batches=str(tmp_path / "b")))
    routes = {
        (route.path.replace(":path", ""), method.lower())
        for route in app.pages.routes
        if route.path != "/openapi.json"
        for method in route.methods - {"HEAD"}
    } | {(path, "post") for path in PATHS.values()}
    paths: dict[str, Any] = app.pages.openapi()["paths"]
    assert {(path, method) for path, operations in paths.items() for method in operations} == routes


def test_streams_are_described_where_there_are_some() -> None:
    paths = describe("1")["paths"]
    for kind, path in PATHS.items():
        asked = json.dumps({**BODIES[path], "stream": True}).encode()
        streams = parse(kind, asked, Names(MODEL)).stream
        content = paths[path]["post"]["responses"]["200"]["content"]
        assert ("text/event-stream" in content) is streams, path
        assert "500" in paths[path]["post"]["responses"]


class Gateway:
    """Asks a gateway from a thread that has no event loop."""

    def __init__(self, c: Cluster, replicas: dict[str, Server]) -> None:
        self._url, self._admin_url = c.url, c.status_url.removesuffix("/status")
        self._urls = {name: one.url for name, one in replicas.items()}

    def check(self, case: Case, refused: bool) -> None:
        """Asks, and holds the answer against the document."""
        if isinstance(case.body, dict):
            case.body = self._harmless(case.body)
        elif case.operation.path == "/workers/{name}" and case.path_parameters["name"] in self._urls:
            case.path_parameters["name"] += "-"
        case.headers = {name: one for name, one in case.headers.items() if name.lower() != "authorization"}
        is_for_operators = case.operation.path.startswith(
            ("/status", "/metrics", "/workers", "/tenants", "/requests", "/limits", "/flush_cache")
        )
        url = self._admin_url if is_for_operators else self._url
        headers = {"authorization": f"Bearer {ADMIN_KEY if is_for_operators else KEY}"}
        answer = case.call(base_url=url, timeout=DEADLINE_S, headers=headers)
        judged = checks.negative_data_rejection if refused else checks.positive_data_acceptance
        case.validate_response(answer, checks=[*CONFORMS, judged])

    def _harmless(self, body: dict[str, Any]) -> dict[str, Any]:
        """`body` with short answers to one prompt, and no address but of a stand-in."""
        body = whole(body)
        if isinstance(body.get("url"), str) and URL.fullmatch(body["url"]):
            body |= {"url": self._urls["r0"], "name": "r0"}
        sampling = body.get("sampling_params")
        for holder in [body, *(sampling if isinstance(sampling, list) else [sampling])]:
            for name in LIMITS if isinstance(holder, dict) else ():
                if type(limit := holder.get(name)) is int and MOST_TOKENS < limit <= 1 << 31:
                    holder[name] = MOST_TOKENS
        return body


def whole(value: Any) -> Any:
    """With 1 where JSON has 1.0, which is an integer to a schema and none to the gateway."""
    match value:
        case dict():
            return {name: whole(one) for name, one in value.items()}
        case list():
            return [whole(one) for one in value]
        case float() if value.is_integer():
            return int(value)
    return value


@pytest.fixture(scope="module", params=[False, True], ids=["open", "with keys"])
def gateway(
    tokenizer: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Gateway]:
    """It is before two stand-ins. In the end nothing is in flight, and everything that was placed has ended once."""
    folder = tmp_path_factory.mktemp("gateway")
    options: dict[str, Any] = {"access": {"batches": str(folder / "batches")}}
    if request.param:
        options["tenants"] = folder / "tenants.yaml"
        options["access"]["admin_port"] = free_port()
        add_tenant(options["tenants"], "gold", KEY)
    with pytest.MonkeyPatch.context() as patch, start_blocking_portal() as portal:
        patch.setenv(KEY_VARIABLE, ADMIN_KEY if request.param else "")
        wrap = portal.wrap_async_context_manager
        with (
            wrap(cluster(tokenizer, replicas=0, **options)) as c,
            wrap(stand_ins(c, tokenizer, "", "")) as replicas,
        ):
            yield Gateway(c, replicas)
            portal.call(c.ended)
            assert not any(one.work["running"] for one in replicas.values())


def ask(gateway: Gateway, operation: APIOperation[Any, Any, Any, Any], mode: GenerationMode) -> None:
    @settings(max_examples=examples(EXAMPLES), suppress_health_check=list(HealthCheck))
    @given(operation.as_strategy(generation_mode=mode))
    def each(case: Case) -> None:
        gateway.check(case, mode is GenerationMode.NEGATIVE)

    each()


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.label)
def test_what_may_be_asked_is_answered(gateway: Gateway, operation: APIOperation[Any, Any, Any, Any]) -> None:
    ask(gateway, operation, GenerationMode.POSITIVE)


@pytest.mark.parametrize("operation", REFUSABLE, ids=lambda operation: operation.label)
def test_what_may_not_be_asked_is_refused(
    gateway: Gateway, operation: APIOperation[Any, Any, Any, Any]
) -> None:
    ask(gateway, operation, GenerationMode.NEGATIVE)
