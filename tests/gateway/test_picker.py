"""The endpoint picker by its protocol: a test asks as a gateway does, and answers as a replica does. The cases are
those of llm-d-router's test/integration/epp, and of what tokens and clients come to."""

import asyncio
import json
import ssl
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("grpclib", reason="no sglang-fair[picker]")

from grpclib.exceptions import GRPCError, StreamTerminatedError
from grpclib.health.v1.health_grpc import HealthStub
from grpclib.health.v1.health_pb2 import HealthCheckRequest

from router.picker.request import CHOSEN_BY_TEST, SHOWN_TO_TEST
from router.picker.server import Server
from router.picker.wire import SERVICE
from router.picker.wire import messages as pb
from sglang_fair.common import token_ids
from sglang_fair.settings import table
from tests.gateway.clusters import CHAT, DONE, Cluster, add_tenant, held_router, listening
from tests.gateway.pickers import Picking, address, picking
from tests.support.certificates import Certificates
from tests.support.programs import main_of
from tests.support.stand_in import event_of, usage
from tests.support.waiting import eventually

pytestmark = pytest.mark.cluster(replicas=3)

ASKED = json.dumps(CHAT).encode()
STREAMED = json.dumps(CHAT | {"stream": True}).encode()
ANSWER = json.dumps({"choices": [{"message": {"content": "é" * 50_000}}], "usage": usage(5, 7, 2)}).encode()


@pytest.fixture
def settings() -> dict[str, Any]:
    return {}


@pytest.fixture
def p(runner: asyncio.Runner, c: Cluster, tokenizer: Path, settings: dict[str, Any]) -> Any:
    made = picking(c, tokenizer, **settings)
    yield runner.run(made.__aenter__())
    runner.run(made.__aexit__(None, None, None))


def addresses(p: Picking) -> list[str]:
    return [address(one) for one in p.c.replicas]


async def counts(p: Picking) -> dict[str, int]:
    return (await p.c.state())["counts"]


async def test_a_request_in_pieces_and_its_answer_in_pieces(p: Picking) -> None:
    exchange = await p.exchange()
    text = "word " * 20_000
    body = json.dumps(CHAT | {"messages": [{"role": "user", "content": text}]}).encode()
    sent = {"content-length": str(len(body)), "x-fair-client": "a", "x-fair-tier": "1", "authorization": "k"}
    await exchange.ask(body, headers=sent | {"x-request-id": "mine"}, pieces=7)
    picked, headers, forwarded = await exchange.picked()
    assert picked == addresses(p)  # the chosen one, and those that may stand in for it
    assert json.loads(forwarded)["messages"][0]["content"] == text
    assert headers["content-length"] == str(len(forwarded))
    assert (headers["x-fair-client"], headers["x-request-id"]) == ("a", "mine")
    assert {"-x-fair-tier", "-authorization"} <= headers.keys()  # what only a gateway may say, and the key
    await exchange.answer(picked[0])
    await exchange.body(ANSWER[:10], ANSWER[10:20_000], b"", ANSWER[20_000:])
    headers, body = await exchange.answered()
    assert body == ANSWER
    assert headers["content-length"] == str(len(ANSWER))
    assert (headers["x-fair-worker"], headers["x-request-id"]) == ("r0", "mine")
    assert await exchange.told() is None
    found = await p.c.ended(ok=1)
    assert (found["counts"]["output_tokens"], found["counts"]["measured_cached_tokens"]) == (7, 2)


@pytest.mark.parametrize("wants_usage", [False, True])
async def test_a_stream_is_passed_as_it_comes_and_its_usage_read(p: Picking, wants_usage: bool) -> None:
    exchange = await p.exchange()
    asked = CHAT | {"stream": True} | ({"stream_options": {"include_usage": True}} if wants_usage else {})
    await exchange.ask(json.dumps(asked).encode())
    picked, headers, forwarded = await exchange.picked()
    assert json.loads(forwarded)["stream_options"] == {"include_usage": True}
    assert token_ids.HEADER not in headers  # nothing is continued elsewhere
    await exchange.answer(picked[0], kind="text/event-stream")
    first, last = (
        event_of({"choices": [{"delta": {"content": "t"}}]}),
        event_of({"choices": [], "usage": usage(5, 9)}),
    )
    await exchange.body(first, ends=False)
    head, piece = await exchange.told(), await exchange.told()  # before the rest is there
    assert head is not None
    assert head.HasField("response_headers")
    assert piece is not None
    assert piece.response_body.response.body_mutation.streamed_response.body == first
    await exchange.body(last[:20], last[20:] + DONE)
    rest = b""
    while (told := await exchange.told()) is not None:
        rest += told.response_body.response.body_mutation.streamed_response.body
    assert rest == (last if wants_usage else b"") + DONE
    assert (await p.c.ended(ok=1))["counts"]["output_tokens"] == 9


async def test_usage_of_messages_is_in_two_events(p: Picking) -> None:
    exchange = await p.exchange()
    body = json.dumps({"max_tokens": 9, "stream": True} | CHAT).encode()
    await exchange.ask(body, path="/v1/messages?beta=true")
    picked, _, _ = await exchange.picked()
    await exchange.answer(picked[0], kind="text/event-stream")
    events = [
        {"type": "message_start", "message": {"usage": {"cache_read_input_tokens": 3, "output_tokens": 0}}},
        {"type": "message_delta", "usage": {"output_tokens": 8}},
        {"type": "message_stop"},
    ]
    stream = b"".join(b"event: %s\n" % one["type"].encode() + event_of(one) for one in events)
    await exchange.body(stream)
    _, passed = await exchange.answered()
    assert passed == stream
    found = (await p.c.ended(ok=1))["counts"]
    assert (found["output_tokens"], found["measured_cached_tokens"]) == (8, 3)


async def test_trailers_are_let_through_both_ways(p: Picking) -> None:
    exchange = await p.exchange()
    await exchange.ask(ASKED + b" ", pieces=2)  # the last piece ends the body
    picked, _, _ = await exchange.picked()
    await exchange.answer(picked[0])
    await exchange.body(ANSWER, ends=False)
    await exchange.send(pb.ProcessingRequest(response_trailers=pb.HttpTrailers()))
    assert (await exchange.answered())[1] == ANSWER
    assert await exchange.told() is None
    exchange = await p.exchange()
    first = pb.ProcessingRequest(request_headers=_post())
    body = pb.ProcessingRequest(request_body=pb.HttpBody(body=ASKED))
    await exchange.send(first, body, pb.ProcessingRequest(request_trailers=pb.HttpTrailers()))
    told = [await exchange.told() for _ in range(3)]
    assert [
        field.name for one in told for field, _ in one.ListFields() if field.name != "dynamic_metadata"
    ] == [
        "request_headers",
        "request_body",
        "request_trailers",
    ]
    assert told[1] is not None
    assert not told[1].request_body.response.body_mutation.streamed_response.end_of_stream


def _post() -> Any:
    from tests.gateway.pickers import CHAT_PATH, named

    return named({":method": "POST", ":path": CHAT_PATH})


# -- which replicas


@pytest.mark.parametrize("written", ["list", "text", "ip"])
async def test_of_a_subset_one_is_chosen(p: Picking, written: str) -> None:
    *_, last = addresses(p)
    subset: Any = {"list": [last, "10.0.0.1:80"], "text": f" {last} ,10.0.0.1:80", "ip": ["127.0.0.1"]}[
        written
    ]
    for _ in range(2):
        exchange = await p.exchange()
        await exchange.ask(ASKED, subset=subset)
        picked, _, _ = await exchange.picked()
        assert picked == [last] if written != "ip" else sorted(picked) == sorted(addresses(p))


@pytest.mark.parametrize("subset", [[], "", ["10.0.0.1:80"]])
async def test_of_an_empty_subset_nobody_is(p: Picking, subset: Any) -> None:
    exchange = await p.exchange()
    await exchange.ask(ASKED, subset=subset)
    status, _, headers = await exchange.refused()
    assert (status, headers["content-type"]) == (503, "application/json")
    get = await p.exchange()
    await get.ask(None, path="/v1/models", subset=subset)
    assert (await get.refused())[0] == 503


@pytest.mark.cluster(replicas=0)
async def test_without_replicas_it_refuses_and_is_not_ready(p: Picking) -> None:
    assert await _health(p) == {"": 2, "readiness": 2, "liveness": 1, SERVICE: 2}
    exchange = await p.exchange()
    await exchange.ask(ASKED)
    assert (await exchange.refused())[0] == 503


async def test_health(p: Picking) -> None:
    await eventually(lambda: p.gateway.link.alive, "the router answers")

    async def is_ready() -> bool:
        return await _health(p) == dict.fromkeys(("", "readiness", "liveness", SERVICE), 1)

    await eventually(is_ready, "it is ready")


async def _health(p: Picking) -> dict[str, int]:
    stub = HealthStub(p.channel)
    names = "", "readiness", "liveness", SERVICE
    return {one: (await stub.Check(HealthCheckRequest(service=one))).status for one in names}


async def test_what_is_only_read_goes_anywhere(p: Picking) -> None:
    exchange = await p.exchange()
    await exchange.ask(None, path="/v1/models", headers={"authorization": "k"})
    head = await exchange.told()
    assert head is not None
    mutation = head.request_headers.response.header_mutation
    assert mutation.set_headers[-1].header.raw_value.decode().split(",")[0] in addresses(p)
    assert list(mutation.remove_headers) == ["authorization"]
    await exchange.answer(addresses(p)[0])
    await exchange.body(b"{", b"}")
    assert (await exchange.answered())[1] == b"{}"
    assert "arrived" not in await counts(p)


@pytest.mark.parametrize(("path", "body"), [("/flush_cache", None), ("/v1/nothing", b"{}")])
async def test_nothing_else_is_let_through(p: Picking, path: str, body: bytes | None) -> None:
    exchange = await p.exchange()
    await exchange.ask(body, path=path)
    assert (await exchange.refused())[0] == 404


@pytest.mark.parametrize("settings", [{}, {"conformance": True}])
async def test_headers_of_the_conformance_suite(p: Picking, settings: dict[str, Any]) -> None:
    wanted = addresses(p)[2]
    exchange = await p.exchange()
    await exchange.ask(ASKED, headers={CHOSEN_BY_TEST: wanted})
    picked, _, _ = await exchange.picked()
    await exchange.answer(picked[0])
    await exchange.body(ANSWER)
    headers, _ = await exchange.answered()
    assert (picked == [wanted], headers.get(SHOWN_TO_TEST)) == ((True, wanted) if settings else (False, None))


@pytest.mark.cluster(replicas=3, router=lambda: {"placement": "d2lpm-queue"})
async def test_prefixes_are_found_as_through_the_gateway(p: Picking) -> None:
    """By the placement that ships: of each prefix all requests go to one replica, and as much is believed cached."""

    async def by_gateway(body: dict[str, Any]) -> str:
        _, headers, _ = await p.c.post("/v1/completions", body)
        return headers["x-fair-worker"]

    async def by_picker(body: dict[str, Any]) -> str:
        exchange = await p.exchange()
        await exchange.ask(json.dumps(body).encode(), path="/v1/completions")
        picked, _, _ = await exchange.picked()
        await exchange.answer(picked[0])
        await exchange.body(json.dumps({"choices": [], "usage": usage(5, 3)}).encode())
        return (await exchange.answered())[0]["x-fair-worker"]

    found = []
    for way, letters in ((by_gateway, "abcd"), (by_picker, "efgh")):
        before = (await counts(p)).get("predicted_tokens", 0)
        served = {
            letter: {await way({"prompt": letter * 64 + 16 * str(number)}) for number in range(4)}
            for letter in letters
        }
        assert all(len(workers) == 1 for workers in served.values()), served
        found.append((await counts(p))["predicted_tokens"] - before)
    assert found[0] == found[1] > 0


# -- who is charged


async def test_whoever_served_is_charged_and_not_the_chosen_one(p: Picking) -> None:
    exchange = await p.exchange()
    await exchange.ask(ASKED)
    picked, _, _ = await exchange.picked()
    await exchange.answer(picked[1])
    await exchange.body(ANSWER)
    headers, _ = await exchange.answered()
    assert headers["x-fair-worker"] == "r1"
    await eventually(lambda: not p.gateway.fleet.in_flight, "it has ended")

    async def is_counted() -> bool:
        return (await counts(p)).get("ended ok") == 1

    await eventually(is_counted, "the router has heard of it")
    found = await p.c.state()
    assert found["counts"]["ended failed"] == found["counts"]["taken over"] == 1
    assert [one["tree_tokens"] > 0 for one in found["workers"].values()] == [False, True, False]
    [shown] = p.gateway.record.latest(None, 1)
    assert shown.tries[0].worker == "r1"


async def test_a_server_that_nobody_knows_is_charged_to_nobody(p: Picking) -> None:
    exchange = await p.exchange()
    await exchange.ask(ASKED)
    await exchange.picked()
    await exchange.answer("10.0.0.1:80")
    await exchange.body(ANSWER)
    assert (await exchange.answered())[0]["x-fair-worker"] == "10.0.0.1:80"
    found = (await p.c.ended(failed=1))["counts"]
    assert "taken over" not in found
    [shown] = p.gateway.record.latest(None, 1)
    assert shown.output_tokens == 7  # the client has had them


async def test_what_the_gateway_answers_itself_has_failed(p: Picking) -> None:
    exchange = await p.exchange()
    await exchange.ask(ASKED)
    await exchange.picked()
    await exchange.answer("", 503, "text/plain")
    await exchange.body(b"no healthy upstream")
    status, error, _ = await exchange.refused()
    assert (status, error["code"]) == (502, "no_replica")
    await p.c.ended(failed=1)


async def test_an_error_of_a_replica_is_put_into_words_of_the_api(p: Picking) -> None:
    exchange = await p.exchange()
    await exchange.ask(ASKED)
    picked, _, _ = await exchange.picked()
    await exchange.answer(picked[0], 400)
    await exchange.body(b'{"object": "error", "message": "as told"}')
    status, error, headers = await exchange.refused()
    assert (status, error["message"], headers["x-fair-worker"]) == (400, "as told", "r0")


# -- who leaves


async def test_a_client_that_leaves_while_its_request_is_held(p: Picking) -> None:
    may_go_on, arrived = held_router(p.c), listening(p.c)
    exchange = await p.exchange()
    await exchange.ask(ASKED)
    await eventually(lambda: arrived, "it waits")
    await exchange.leave()
    await eventually(lambda: not p.gateway.capacity.requests.taken, "it is given up")
    may_go_on.set()
    await p.c.ended(failed=1)
    [shown] = p.gateway.record.latest(None, 1)
    assert shown.outcome == "left"


async def test_a_client_that_leaves_in_the_middle_of_its_stream(p: Picking) -> None:
    exchange = await p.exchange()
    await exchange.ask(STREAMED)
    picked, headers, _ = await exchange.picked()
    await exchange.answer(picked[0], kind="text/event-stream")
    for _ in range(3):
        await exchange.body(event_of({"choices": [{"delta": {"content": "t"}}]}), ends=False)
    for _ in range(4):
        await exchange.told()
    await exchange.leave()
    found = (await p.c.ended(aborted=1))["counts"]
    assert found["output_tokens"] == 2  # the first event of a chat names the role
    rid = headers["x-fair-attempt"]
    await eventually(lambda: p.c.replicas[0].aborted == [rid], "its replica is told")


async def test_a_gateway_that_answers_by_itself_while_a_request_is_held(p: Picking) -> None:
    may_go_on, arrived = held_router(p.c), listening(p.c)
    exchange = await p.exchange()
    await exchange.ask(ASKED)
    await eventually(lambda: arrived, "it waits")
    await exchange.answer("", 504)
    assert await exchange.told() is None
    may_go_on.set()
    await p.c.ended(failed=1)


# -- who asks


@pytest.fixture
def tenants(tmp_path: Path) -> Path:
    path = tmp_path / "tenants.yaml"
    add_tenant(path, "a", limits={"tokens_per_minute": 60})
    add_tenant(path, "b")
    return path


@pytest.fixture
def with_tenants(tenants: Path, settings: dict[str, Any]) -> None:
    settings["tenants"] = str(tenants)


@pytest.mark.usefixtures("with_tenants")
async def test_keys_and_limits_are_the_gateways(p: Picking) -> None:
    for headers in ({}, {"authorization": "Bearer nobody"}, {"x-gateway-inference-fairness-id": "a"}):
        exchange = await p.exchange()
        await exchange.ask(ASKED, headers=headers)
        assert (await exchange.refused())[0] == 401
    get = await p.exchange()
    await get.ask(None, path="/v1/models")
    assert (await get.refused())[0] == 401
    body = json.dumps(CHAT | {"max_tokens": 30}).encode()
    exchange = await p.exchange()
    await exchange.ask(body, headers={"authorization": "Bearer a"})
    picked, sent, _ = await exchange.picked()
    assert sent["x-fair-client"] == "a"
    await exchange.answer(picked[0])
    await exchange.body(ANSWER)
    headers, _ = await exchange.answered()
    assert headers["x-ratelimit-limit-tokens"] == "60"
    left = await p.gateway.quotas.left("a", p.gateway.directory.by_name("a").tenant.limits)
    assert left[0][2] == 60 - 21 - 7  # what it was, and not what it might have been
    exchange = await p.exchange()
    await exchange.ask(body, headers={"authorization": "Bearer a"})
    status, error, headers = await exchange.refused()
    assert (status, error["code"]) == (429, "rate_limit_exceeded")
    assert int(headers["retry-after"]) > 0


@pytest.mark.usefixtures("with_tenants")
@pytest.mark.parametrize("name", ["x-gateway-inference-fairness-id", "x-llm-d-inference-fairness-id"])
@pytest.mark.parametrize("settings", [{"trusted_proxies": "127.0.0.0/8"}, {"trusted_proxies": "10.0.0.0/8"}])
async def test_only_a_trusted_gateway_names_the_client(
    p: Picking, settings: dict[str, Any], name: str
) -> None:
    exchange = await p.exchange()
    await exchange.ask(ASKED, headers={name: "b", "authorization": "Bearer a"})
    is_trusted = settings["trusted_proxies"].startswith("127")
    assert (await exchange.picked())[1]["x-fair-client"] == ("b" if is_trusted else "a")


@pytest.mark.parametrize(
    ("headers", "due"),
    [
        ({"x-llm-d-slo-ttft-ms": "1500"}, ("interactive", 1.5)),
        ({"x-gateway-inference-objective": "batch-1"}, ("batch-1", 60.0)),
        ({"x-llm-d-inference-objective": "batch-1", "x-fair-class": "batch-2"}, ("batch-2", 3600.0)),
        ({"x-gateway-inference-objective": "of another kind"}, ("interactive", 20.0)),
    ],
)
async def test_deadlines(p: Picking, headers: dict[str, str], due: tuple[str, float]) -> None:
    arrived = listening(p.c)
    exchange = await p.exchange()
    await exchange.ask(ASKED, headers=headers)
    await exchange.picked()
    assert arrived[0].due is not None
    assert (arrived[0].due.slo_class, arrived[0].due.slo_s) == due


@pytest.mark.parametrize("body", [b"{", b"[]", b'{"messages": 1}'])
async def test_what_is_no_request(p: Picking, body: bytes) -> None:
    exchange = await p.exchange()
    await exchange.ask(body)
    assert (await exchange.refused())[0] == 400
    assert "arrived" not in await counts(p)


@pytest.mark.parametrize("settings", [{"max_body_bytes": 100}])
async def test_a_body_that_is_too_large(p: Picking) -> None:
    exchange = await p.exchange()
    await exchange.ask(b" " * 101, pieces=2)
    assert (await exchange.refused())[0] == 413


async def test_streams_that_are_no_conversation(p: Picking) -> None:
    buffered = pb.ProcessingRequest(request_headers=_post())
    buffered.protocol_config.request_body_mode = 2
    for first in (pb.ProcessingRequest(request_body=pb.HttpBody(body=ASKED)), buffered):
        exchange = await p.exchange()
        await exchange.send(first)
        with pytest.raises((GRPCError, StreamTerminatedError)):
            await exchange.ends()


# -- the process


async def test_a_certificate_is_its_own_or_given_and_renewed(p: Picking, tmp_path: Path) -> None:
    given = Certificates.make(tmp_path / "given")
    own = {"port": 0, "router": (p.c.router.endpoint,), "model_name": "m", "tokenizer": ""}
    for more in ({}, {"tls_cert": given.certificate, "tls_key": given.key}):
        server = Server(p.gateway, table.Picker(**own, **more))
        port = await server.start()
        shown = await asyncio.to_thread(ssl.get_server_certificate, ("127.0.0.1", port))
        if more:
            assert shown.strip() in Path(given.certificate).read_text()
            again = Certificates.make(tmp_path / "given")
            shown = await asyncio.to_thread(ssl.get_server_certificate, ("127.0.0.1", port))
            assert shown.strip() in Path(again.certificate).read_text()
        await server.close(0.0, 0.0)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--plaintext", "--tls-cert", "x.pem"], "--plaintext and --tls-cert: give one of them"),
        (["--plaintext", "--host", "0.0.0.0"], "--host 0.0.0.0 is reached from elsewhere"),
        (["--tries", "0"], "--tries"),
        (["--tls-cert", "none.pem"], "none.pem"),
    ],
)
def test_settings_that_cannot_be(words: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    needed = ["--router", "tcp://127.0.0.1:1", "--model-name", "m", "--tokenizer", "."]
    assert main_of("picker")([*needed, *words]) == 2
    assert why in capsys.readouterr().err
