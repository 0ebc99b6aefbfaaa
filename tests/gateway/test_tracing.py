"""Spans of requests at a gateway over real sockets: one tree for each, however it ends; and none where they are off."""

import asyncio
import logging
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from router.events import WorkerUp
from router.gateway import otlp, tracing
from router.gateway.__main__ import main as gateway
from router.gateway.app import Config, create_app
from router.gateway.guard import KEY_VARIABLE
from sglang_fair.cluster.options import Options
from sglang_fair.cluster.options import check as check_cluster
from sglang_fair.settings.setting import SettingError
from sglang_fair.tenants import edit, keys
from sglang_fair.tenants.model import Limits, Tenant
from tests.gateway.test_gateway import (
    COMPLETION,
    ENDPOINTS,
    MODEL,
    ROUTER_TIMEOUT_S,
    Cluster,
    held_router,
    run,
)
from tests.support.collector import Collector, Node, node_of, tree
from tests.support.ports import free_port
from tests.support.stand_in import Engine, Server, make_tokenizer
from tests.support.waiting import eventually, wait_until

pytestmark = pytest.mark.slow

TRACE, CALLER = "ab" * 16, "cd" * 8
SAMPLED = {"traceparent": f"00-{TRACE}-{CALLER}-01", "tracestate": "vendor=1"}
NOT_SAMPLED = {"traceparent": f"00-{TRACE}-{CALLER}-00"}
SECRET = "nobody-may-read-this"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


class Memory(InMemorySpanExporter):
    """What a gateway exports, as nodes."""

    def nodes(self, name: str = "") -> list[Node]:
        return [node for span in self.get_finished_spans() if name in (node := node_of(span)).name]

    async def trees(self, count: int) -> list[Node]:
        """The trees of `count` requests, when all have ended, in the order in which they came."""

        def roots() -> list[Node]:
            return sorted(self.nodes("POST"), key=lambda node: node.began_ns)

        await eventually(lambda: len(roots()) >= count, f"{count} roots")
        found = roots()
        assert len(found) == count
        nodes = self.nodes()
        if len({root.trace for root in found}) == count:
            return [tree([node for node in nodes if node.trace == root.trace], root.parent) for root in found]
        assert count == 1
        return [tree(nodes, found[0].parent)]


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Memory:
    exporter = Memory()
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
    monkeypatch.setattr(tracing, "otlp", lambda endpoint: tracing.Delivery(exporter, endpoint))
    return exporter


ON = {"otlp_traces_endpoint": "http://127.0.0.1:1"}


def traced(body: Callable[[Cluster], Awaitable[None]], tokenizer: Path, **options: Any) -> None:
    access = {**ON, **options.pop("access", {})}
    run(body, tokenizer, access=access, **options)


def state(c: Cluster) -> dict[str, int]:
    assert c.gateway.tracing is not None
    return c.gateway.tracing.state()


# ---- one tree


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("headers", [{}, SAMPLED])
def test_the_spans_of_a_request_are_one_tree(
    tokenizer: Path, memory: Memory, stream: bool, headers: dict[str, str]
) -> None:
    async def body(c: Cluster) -> None:
        for number, (path, asked) in enumerate(ENDPOINTS.items()):
            memory.clear()
            name = {"x-request-id": f"mine-{number}", "x-fair-client": "alice"}
            status, answered, _ = await c.post(path, asked | {"stream": stream}, headers={**headers, **name})
            assert status == 200
            [root] = await memory.trees(1)
            assert root.names() == [
                f"POST {path}", ["attempt", ["placement"], ["waiting"], ["prefill"], ["decode"]]
            ]  # fmt: skip
            assert (root.kind, root.service, root.failed) == ("SERVER", "sglang-fair-gateway", False)
            if headers:
                assert (root.trace, root.parent) == (TRACE, CALLER)
            else:
                assert root.parent == ""
            assert root.attributes["http.response.status_code"] == 200
            assert root.attributes["gen_ai.request.model"] == MODEL
            assert root.attributes["sglang_fair.request"] == f"mine-{number}"
            assert root.attributes["sglang_fair.client"] == "alice"
            assert root.attributes["sglang_fair.outcome"] == "ok"
            assert root.attributes["gen_ai.usage.output_tokens"] == 3
            [attempt] = root.children
            assert attempt.kind == "CLIENT"
            assert attempt.attributes["sglang_fair.id"] == answered["x-fair-request-id"]
            assert attempt.attributes["sglang_fair.outcome"] == "ok"
            placement, waiting, prefill, decode = attempt.children
            assert placement.service == "sglang-fair-router"
            assert placement.attributes["sglang_fair.why"] == "only"
            assert placement.attributes["sglang_fair.worker.worker"] == "r0"
            assert {part.service for part in (waiting, prefill, decode)} == {"sglang-fair-replica"}
            assert prefill.attributes["sglang_fair.cached_tokens"] == 2
            assert decode.attributes["sglang_fair.outcome"] == "finished"
            # What the replica makes itself is below the attempt.
            sent = c.replicas[0].requests[-1][1]
            assert sent["traceparent"] == f"00-{root.trace}-{attempt.id}-{sent['traceparent'][-2:]}"
            assert int(sent["traceparent"][-2:], 16) & 1
            assert sent.get("tracestate") == headers.get("tracestate")
        assert state(c)["unexplained"] == 0

    traced(body, tokenizer)


def test_an_explanation_and_a_line_in_the_log_name_the_trace(
    tokenizer: Path, memory: Memory, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    async def body(c: Cluster) -> None:
        await c.post("/generate", ENDPOINTS["/generate"], headers={**SAMPLED, "x-request-id": "mine"})
        async with c.http.get(c.url + "/explain/mine") as answer:
            [request] = (await answer.json())["requests"]
        assert request["trace_id"] == TRACE

    traced(body, tokenizer, access={"log_format": "json"})
    [line] = [one for one in caplog.records if one.name == "gateway.requests"]
    assert line.__dict__["fields"]["trace_id"] == TRACE


def test_each_attempt_is_there(tokenizer: Path, memory: Memory) -> None:
    async def body(c: Cluster) -> None:
        c.replicas[0].mode = c.replicas[1].mode = "die"
        status, _, _ = await c.post("/v1/completions", COMPLETION)
        assert status == 200
        [root] = await memory.trees(1)
        assert root.attributes["sglang_fair.retries"] == 2
        assert not root.failed
        first, second, third = root.below("attempt")
        assert [one.failed for one in (first, second, third)] == [True, True, False]
        assert "sglang_fair.reason" in first.attributes
        assert first.ended_ns <= second.began_ns <= second.ended_ns <= third.began_ns
        assert [one.below("placement")[0].attributes["sglang_fair.why"] for one in (second, third)] == [
            "retry", "retry"
        ]  # fmt: skip
        assert third.below("placement")[0].attributes["sglang_fair.excluded"] == ["r0", "r1"]
        assert [one.below("decode")[0].attributes["sglang_fair.outcome"] for one in (first, third)] == [
            "finished", "finished"
        ]  # fmt: skip
        parents = [replica.requests[-1][1]["traceparent"].split("-")[2] for replica in c.replicas]
        assert parents == [first.id, second.id, third.id]

    traced(body, tokenizer, replicas=3)


def test_a_stream_that_goes_on_elsewhere(tokenizer: Path, memory: Memory) -> None:
    async def body(c: Cluster) -> None:
        servers = {}
        for name in ("s0", "s1"):
            app = Server(Engine(tokenizer), 0.02).app
            runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.01)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            servers[name] = runner
            c.router.tell(WorkerUp(name, f"http://127.0.0.1:{runner.addresses[0][1]}"))
        await eventually(lambda: c.router.shell is not None and len(c.gateway.fleet.workers) == 2, "workers")
        asked = {"model": MODEL, "prompt": "hi", "stream": True, "max_tokens": 40, "temperature": 0}
        async with c.http.post(c.url + "/v1/completions", json=asked) as answer:
            await answer.content.readuntil(b"\n\n")
            first = answer.headers["x-fair-worker"]
            await servers.pop(first).cleanup()
            assert (await answer.read()).endswith(b"[DONE]\n\n")
        [root] = await memory.trees(1)
        assert (root.attributes["sglang_fair.resumes"], root.attributes["sglang_fair.retries"]) == (1, 0)
        one, other = root.below("attempt")
        assert (one.failed, other.failed) == (True, False)
        assert one.attributes["sglang_fair.worker"] == first
        assert other.attributes["sglang_fair.worker"] != first
        assert "replica_error" in str(one.attributes)
        for runner in servers.values():
            await runner.cleanup()

    traced(body, tokenizer, replicas=0)


def test_a_stream_that_breaks_off_is_an_error(tokenizer: Path, memory: Memory) -> None:
    async def body(c: Cluster) -> None:
        c.replicas[0].mode = "die midway"
        await c.post("/v1/completions", COMPLETION | {"stream": True})
        [root] = await memory.trees(1)
        assert root.failed
        assert root.attributes["sglang_fair.outcome"] == "failed"
        assert "replica_lost" in root.attributes["sglang_fair.error"]

    traced(body, tokenizer)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves(tokenizer: Path, memory: Memory, stream: bool) -> None:
    async def body(c: Cluster) -> None:
        replica = c.replicas[0]
        replica.mode = "endless"
        if stream:
            async with c.http.post(
                c.url + "/generate", json=ENDPOINTS["/generate"] | {"stream": True}
            ) as answer:
                await answer.content.readuntil(b"\n\n")
                answer.close()
        else:
            asking = asyncio.create_task(c.post("/generate", ENDPOINTS["/generate"]))
            await eventually(lambda: replica.working, "the replica is at work")
            asking.cancel()
        [root] = await memory.trees(1)
        assert root.attributes["sglang_fair.outcome"] == "left"
        assert not root.failed
        [attempt] = root.children
        assert attempt.attributes["sglang_fair.outcome"] == "left"
        assert not attempt.failed
        # It was asked until it had stopped.
        assert "sglang_fair.outcome" in attempt.below("decode")[0].attributes

    traced(body, tokenizer)


@pytest.fixture
def tenants(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(KEY_VARIABLE, "the admin's")
    path = tmp_path / "tenants.yaml"
    limits = Limits(requests_per_minute=1)
    edit.add(path, "gold", Tenant(keys=[keys.written(keys.digest("gold"))], limits=limits))
    return path


def test_what_is_refused_has_a_span_with_its_status(tokenizer: Path, memory: Memory, tenants: Path) -> None:
    async def body(c: Cluster) -> None:
        async def ask(key: str, body: dict[str, Any]) -> int:
            headers = {"authorization": f"Bearer {key}"}
            return (await c.post("/v1/completions", body, headers=headers))[0]

        async def turn() -> bool:
            """Both requests of one minute: the second is refused."""
            memory.clear()
            return [await ask("gold", {"prompt": 7}), await ask("gold", COMPLETION)] == [400, 429]

        assert await ask("invented", COMPLETION) == 401
        [unknown] = await memory.trees(1)
        assert unknown.attributes["http.response.status_code"] == 401
        assert unknown.attributes["sglang_fair.client"] == "-"
        await eventually(turn, "two requests in one minute")
        for root, status in zip(await memory.trees(2), (400, 429), strict=True):
            assert root.names() == ["POST /v1/completions"]
            assert root.attributes["http.response.status_code"] == status
            assert root.attributes["sglang_fair.outcome"] == "refused"
            assert root.attributes["sglang_fair.error"]
            assert not root.failed, "its client's fault is no error of a server"

    access = {"tenants": str(tenants), "admin_port": free_port()}
    traced(body, tokenizer, access=access)


def test_when_no_replica_is_there(tokenizer: Path, memory: Memory) -> None:
    async def body(c: Cluster) -> None:
        assert (await c.post("/v1/completions", COMPLETION))[0] == 503
        [root] = await memory.trees(1)
        assert root.names() == ["POST /v1/completions", ["attempt", ["placement"]]]
        assert root.failed
        [attempt] = root.children
        assert attempt.failed
        assert attempt.children[0].attributes["sglang_fair.refused"] == "no worker is up"

    traced(body, tokenizer, replicas=0)


def test_without_a_router_the_gateway_places(tokenizer: Path, memory: Memory) -> None:
    async def body(c: Cluster) -> None:
        await eventually(lambda: len(c.gateway.fleet.workers) == 1, "the gateway knows the workers")
        c.router.close()
        await eventually(lambda: not c.gateway.link.alive, "the gateway misses the router")
        assert (await c.post("/v1/completions", COMPLETION))[0] == 200
        [root] = await memory.trees(1)
        [attempt] = root.children
        assert attempt.names() == ["attempt", ["placement"], ["waiting"], ["prefill"], ["decode"]]
        [placement] = attempt.below("placement")
        assert (placement.service, placement.attributes["sglang_fair.why"]) == (
            "sglang-fair-gateway",
            "gateway",
        )
        assert "router" in attempt.attributes["sglang_fair.router_error"]

    traced(body, tokenizer)


def test_a_router_that_does_not_answer_in_time(tokenizer: Path, memory: Memory) -> None:
    """The gateway places under another id, in case the router has placed it all the same."""

    async def body(c: Cluster) -> None:
        await eventually(lambda: c.gateway.fleet.workers, "the gateway knows the worker")
        may_go_on = held_router(c)
        assert (await c.post("/v1/completions", COMPLETION))[0] == 200
        may_go_on.set()
        [root] = await memory.trees(1)
        [attempt] = root.children
        assert attempt.names() == ["attempt", ["placement"], ["waiting"], ["prefill"], ["decode"]]
        assert attempt.children[0].attributes["sglang_fair.why"] == "gateway"

    traced(body, tokenizer, router_timeout_s=ROUTER_TIMEOUT_S)


def test_a_replica_without_the_overlay_or_with_other_records(
    tokenizer: Path, memory: Memory, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(c: Cluster) -> None:
        record = c.replicas[0].record
        for odd in ([], [{"id": "x"}], [{"state": "ended", "waited_s": 1}], ["text"], None):
            memory.clear()
            monkeypatch.setattr(record, "find", lambda *_, odd=odd: odd or [])
            assert (await c.post("/v1/completions", COMPLETION))[0] == 200
            [root] = await memory.trees(1)
            assert root.names()[1][0] == "attempt"
            assert "waiting" not in str(root.names())

    traced(body, tokenizer)
    assert len([one for one in caplog.records if "said once" in one.message]) == 1


# ---- who is sampled, and who lies


def test_who_is_not_sampled_costs_no_question_and_stays_so_at_the_replica(
    tokenizer: Path, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(c: Cluster) -> None:
        await c.post("/v1/completions", COMPLETION, headers=NOT_SAMPLED)
        sent = c.replicas[0].requests[-1][1]["traceparent"].split("-")
        assert (sent[1], int(sent[3], 16) & 1) == (TRACE, 0)
        assert sent[2] != CALLER
        await c.post("/v1/completions", COMPLETION)
        [root] = await memory.trees(1)
        assert root.trace != TRACE
        assert c.replicas[0].explained == 1

    traced(body, tokenizer)
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    memory.clear()

    async def nobody(c: Cluster) -> None:
        await c.post("/v1/completions", COMPLETION, headers=SAMPLED)
        await c.ended(ok=1)
        assert not c.gateway.tracing._ending  # type: ignore[union-attr]
        assert state(c)["made"] == c.replicas[0].explained == 0

    traced(nobody, tokenizer)
    assert not memory.nodes()


def test_headers_that_are_none_begin_a_trace_and_leave_no_line(
    tokenizer: Path, memory: Memory, caplog: pytest.LogCaptureFixture
) -> None:
    odd = (
        {"traceparent": "x", "tracestate": "vendor=1"},
        {"traceparent": "0" * 5000, "tracestate": "vendor=1"},
        {"traceparent": f"00-{'0' * 32}-{CALLER}-01", "tracestate": "vendor=1"},
        {"traceparent": f"00-{TRACE}-{CALLER}-01-more", "tracestate": "vendor=1"},
        {"traceparent": f"ff-{TRACE}-{CALLER}-01", "tracestate": "vendor=1"},
        {"tracestate": "vendor=1"},
    )

    async def body(c: Cluster) -> None:
        for headers in odd:
            memory.clear()
            assert (await c.post("/v1/completions", COMPLETION, headers=headers))[0] == 200
            [root] = await memory.trees(1)
            assert root.trace != TRACE
            assert root.parent == ""
            assert "tracestate" not in c.replicas[0].requests[-1][1]
        for tracestate in ("=,=;" * 50, "a=1,a=2", "x" * 5000, ",".join(f"k{n}=1" for n in range(40))):
            headers = {**SAMPLED, "tracestate": tracestate}
            assert (await c.post("/v1/completions", COMPLETION, headers=headers))[0] == 200

    traced(body, tokenizer)
    assert not [one for one in caplog.records if one.name.startswith("opentelemetry")]


def test_no_text_is_in_a_span(tokenizer: Path, memory: Memory) -> None:
    async def body(c: Cluster) -> None:
        asked = [
            ("/v1/chat/completions", {"model": MODEL, "messages": [{"role": "user", "content": SECRET}]}),
            ("/v1/completions", COMPLETION | {"prompt": SECRET, "stream": True}),
            ("/generate", {"text": SECRET, "sampling_params": {"stop": SECRET}}),
            ("/v1/completions", {"prompt": {"text": SECRET}}),
            ("/v1/chat/completions", {"messages": [{"role": SECRET}]}),
        ]
        for path, each in asked:
            await c.post(path, each)
        await c.post("/generate", data=f'{{"text": "{SECRET}" "{SECRET}"')
        await memory.trees(len(asked) + 1)
        for span in memory.get_finished_spans():
            assert SECRET not in span.to_json()
            assert "ttt" not in span.to_json()

    traced(body, tokenizer)


# ---- a flood, and a collector that is away


def test_of_a_flood_of_endings_the_gateway_says_what_it_knows(
    tokenizer: Path, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracing, "MOST_ENDING", 2)

    async def body(c: Cluster) -> None:
        assert c.gateway.tracing is not None
        explain, may_go_on = c.gateway.tracing._explain, asyncio.Event()

        async def slowly(exchange: Any) -> Any:
            await may_go_on.wait()
            return await explain(exchange)

        monkeypatch.setattr(c.gateway.tracing, "_explain", slowly)
        for _ in range(5):
            assert (await c.post("/v1/completions", COMPLETION))[0] == 200
        early = await memory.trees(3)
        assert state(c)["unexplained"] == 3
        for root in early:
            assert root.names() == ["POST /v1/completions", ["attempt", ["placement"]]]
            assert "not asked" in root.children[0].attributes["sglang_fair.replica_error"]
        may_go_on.set()
        late = await memory.trees(5)
        assert sum(bool(root.children[0].below("decode")) for root in late) == 2

    traced(body, tokenizer)


def test_those_who_may_not_ask_push_nobody_out(tokenizer: Path, memory: Memory) -> None:
    """A thousand invented keys in three seconds, each with a sampled trace of its own."""

    async def body(c: Cluster) -> None:
        made = c.gateway.tracing
        assert made is not None
        record = c.gateway.record
        for number in range(1000):
            exchange = record.came("chat", None)
            trace = made.begin(
                exchange, "/v1/chat/completions", {"traceparent": f"00-{number + 1:032x}-{CALLER}-01"}
            )
            record.ended(exchange, "refused")
            exchange.ended_s = exchange.came_s + number // 400
            trace.end()
        known = record.came("chat", "known")
        record.enter(known)
        trace = made.begin(known, "/v1/chat/completions", {})
        record.ended(known, "refused")
        trace.end()
        most = 4 * tracing.MOST_UNKNOWN  # they may come in the middle of a second
        assert state(c)["unknown"] >= 1000 - most
        assert state(c)["made"] == 1001 - state(c)["unknown"]
        roots = await memory.trees(state(c)["made"])
        assert [root.attributes["sglang_fair.request"] for root in roots].count("known") == 1

    traced(body, tokenizer)


def test_a_replica_that_is_not_done_is_asked_again(
    tokenizer: Path, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(c: Cluster) -> None:
        record = c.replicas[0].record
        find, answers = record.find, ["running", "running", "ended"]

        def later(*asked: Any) -> list[dict[str, Any]]:
            state = answers.pop(0)
            ended = {} if state == "ended" else {"outcome": None}
            return [{**one, "state": state, **ended} for one in find(*asked)]

        monkeypatch.setattr(record, "find", later)
        assert (await c.post("/v1/completions", COMPLETION))[0] == 200
        [root] = await memory.trees(1)
        assert not answers
        assert root.children[0].below("decode")[0].attributes["sglang_fair.outcome"] == "finished"

    traced(body, tokenizer)


def test_a_gateway_that_ends_sends_what_it_has(
    tokenizer: Path, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "600000")

    async def body(c: Cluster) -> None:
        assert c.gateway.tracing is not None

        async def never(_: Any) -> Any:
            await asyncio.Event().wait()

        c.gateway.tracing._explain = never
        assert (await c.post("/v1/completions", COMPLETION))[0] == 200

    traced(body, tokenizer)
    root = tree(memory.nodes())
    assert root.names() == ["POST /v1/completions", ["attempt", ["placement"]]]


def test_while_the_collector_is_away_requests_go_on_and_one_line_says_so(
    tokenizer: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "1")
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "16")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "4")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.01")
    caplog.set_level(logging.WARNING)

    async def body(c: Cluster) -> None:
        for _ in range(20):
            assert (await c.post("/v1/completions", COMPLETION))[0] == 200
        await eventually(lambda: state(c)["made"] == 20 * 6, "all spans are made")
        await eventually(lambda: state(c)["failed"] > 8, "and several batches have failed")
        assert state(c)["sent"] == 0

    access = {"otlp_traces_endpoint": f"http://user:{SECRET}@127.0.0.1:{free_port()}"}
    traced(body, tokenizer, access=access)
    lines = [one.message for one in caplog.records if one.levelno >= logging.WARNING]
    assert len([line for line in lines if "spans cannot be delivered" in line]) == 1
    assert not [one for one in caplog.records if one.name.startswith("opentelemetry")]
    assert SECRET not in caplog.text


class Failing(SpanExporter):
    """Fails as told."""

    def __init__(self) -> None:
        self.results: list[SpanExportResult | Exception] = []

    def export(self, _: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self.results.pop(0)
        if isinstance(result, Exception):
            raise result
        return result

    def shutdown(self) -> None:
        pass


def test_each_outage_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    good, bad = SpanExportResult.SUCCESS, SpanExportResult.FAILURE
    failing = Failing()
    delivery = tracing.Delivery(failing, "collector:4318")
    failing.results = [good, bad, RuntimeError("odd"), bad, good, good, ValueError("other"), bad]
    while failing.results:
        delivery.export([])
    delivery.close()
    said = [one.message for one in caplog.records]
    assert len(said) == 3
    assert said[0].startswith("spans cannot be delivered to collector:4318")
    assert said[1] == "spans are delivered to collector:4318 again"
    assert said[2].endswith("ValueError: other")


def test_a_gateway_ends_soon_while_its_collector_is_silent(
    tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It accepts connections and says nothing."""
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "1")

    async def main(url: str) -> None:
        app = create_app(
            Config(("tcp://127.0.0.1:17998",), MODEL, str(tokenizer), 0.1, otlp_traces_endpoint=url)
        )
        made = app.gateway.tracing
        assert made is not None
        await app.gateway.start()
        exchange = app.gateway.record.came("chat", None)
        trace = made.begin(exchange, "/v1/chat/completions", {})
        app.gateway.record.ended(exchange, "left")
        trace.end()
        closing = asyncio.create_task(made.close())
        done, _ = await asyncio.wait([closing], timeout=10 * tracing.CLOSE_S)
        assert done, "the SDK would wait for thirty seconds"
        await app.gateway.close()

    with socket.create_server(("127.0.0.1", 0)) as silent:
        asyncio.run(main(f"http://127.0.0.1:{silent.getsockname()[1]}"))
    names = "OtelBatchSpanRecordProcessor"
    wait_until(lambda: names not in {one.name for one in threading.enumerate()}, "the SDK's thread")


# ---- off, and on


def test_off_nothing_of_the_sdk_is_imported(tokenizer: Path) -> None:
    program = f"""
import sys
import router.__main__, router.gateway.__main__, sglang_fair.cluster.__main__, sglang_fair.cli
from router.gateway.app import Config, create_app
made = create_app(Config(("tcp://127.0.0.1:1",), "tiny", {str(tokenizer)!r}))
assert made.gateway.tracing is None
found = [name for name in sys.modules if name.startswith(("opentelemetry.sdk", "opentelemetry.exporter"))]
found += [name for name in sys.modules if name == "router.gateway.tracing"]
assert not found, found
"""
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize(
    "url", ["", "collector:4318", "grpc://h:4317", "http://", "http://h:x", "http://h:99999"]
)
def test_what_is_no_url_is_refused(url: str) -> None:
    for check in (otlp.check, otlp.traces_url):
        with pytest.raises(SettingError, match="--otlp-traces-endpoint must be a URL"):
            check(url)
    with pytest.raises(SettingError) as found:
        check_cluster(Options(otlp_traces_endpoint=url))
    assert found.value.field == "otlp_traces_endpoint"


def test_an_address_without_a_path_is_the_collectors_own() -> None:
    assert otlp.traces_url("http://h:4318") == otlp.traces_url("http://h:4318/") == "http://h:4318/v1/traces"
    assert otlp.traces_url("https://h/otel/v1/traces") == "https://h/otel/v1/traces"


def test_without_the_library_one_line_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(otlp, "PACKAGES", ("opentelemetry.not_there", "not_there.at.all"))
    arguments = ["--port", "1", "--router", "tcp://127.0.0.1:1", "--model-name", "m", "--tokenizer", "t"]
    assert gateway([*arguments, "--otlp-traces-endpoint", "http://h:4318"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "pip install 'sglang-fair[otel]'" in line
    with pytest.raises(SettingError, match=r"sglang-fair\[otel\]"):
        check_cluster(Options(otlp_traces_endpoint="http://h:4318"))


def test_a_collector_gets_them_by_otlp_with_the_headers_of_the_environment(
    tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-key=secret")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "our-gateway")
    with Collector() as collector:

        async def body(c: Cluster) -> None:
            assert (await c.post("/v1/completions", COMPLETION, headers=SAMPLED))[0] == 200
            await eventually(lambda: len(collector.of(TRACE)) == 6, "all spans have come")
            await eventually(lambda: state(c)["sent"] == 6, "they are counted")
            status = await c.state()
            assert status["gateway"]["spans"] == {
                "made": 6, "sent": 6, "failed": 0, "unexplained": 0, "unknown": 0
            }  # fmt: skip

        run(body, tokenizer, access={"otlp_traces_endpoint": collector.url})
        root = tree(collector.of(TRACE), CALLER)
        assert root.names()[1] == ["attempt", ["placement"], ["waiting"], ["prefill"], ["decode"]]
        assert root.service == "our-gateway"
        assert abs(root.began_ns / 1e9 - time.time()) < 3600, "since the epoch"
        assert (collector.path, collector.headers["x-key"]) == ("/v1/traces", "secret")


def test_names_that_cannot_be_encoded_lose_no_other_span(tokenizer: Path) -> None:
    """A batch goes as a whole, so one bad name must not cost it."""
    with Collector() as collector:

        async def body(c: Cluster) -> None:
            odd = COMPLETION | {"user": "\ud800", "model": f"{MODEL}:\ud800"}
            await c.post("/v1/completions", odd, headers=SAMPLED)
            headers = {"x-fair-client": "ä" * 300, "x-request-id": "x" * 100}
            await c.post("/v1/completions", COMPLETION, headers=headers)

        run(body, tokenizer, access={"otlp_traces_endpoint": collector.url})
        wait_until(lambda: len([n for n in collector.nodes if "POST" in n.name]) == 2, "both requests")
