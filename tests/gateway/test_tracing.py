"""Spans of requests at a gateway over real sockets: one tree for each, however it ends; and none where they are off."""

import asyncio
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from router.gateway import otlp, tracing
from router.gateway.__main__ import main as gateway
from sglang_fair.cluster.options import Options
from sglang_fair.cluster.options import check as check_cluster
from sglang_fair.settings.setting import SettingError
from sglang_fair.tenants.model import Limits
from tests.gateway.clusters import COMPLETION, ENDPOINTS, MODEL, Cluster, add_tenant, cluster
from tests.support.collector import Collector, Node, node_of, tree
from tests.support.waiting import eventually, wait_until

TRACE, CALLER = "ab" * 16, "cd" * 8
SAMPLED = {"traceparent": f"00-{TRACE}-{CALLER}-01", "tracestate": "vendor=1"}
NOT_SAMPLED = {"traceparent": f"00-{TRACE}-{CALLER}-00"}
SECRET = "nobody-may-read-this"
SERVED = ["attempt", ["placement"], ["first token"], ["answer"]]
"""Of a stream."""


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
    monkeypatch.setattr(tracing, "otlp", lambda _: exporter)
    return exporter


ON = {"otlp_traces_endpoint": "http://127.0.0.1:1"}


@pytest.fixture
def options(options: dict[str, Any]) -> dict[str, Any]:
    return {**options, "access": {**ON, **options.get("access", {})}}


# ---- one tree


@pytest.mark.parametrize(("stream", "headers"), [(False, {}), (True, {}), (True, SAMPLED)])
async def test_the_spans_of_a_request_are_one_tree(
    memory: Memory, stream: bool, headers: dict[str, str], c: Cluster
) -> None:
    for number, (path, asked) in enumerate(ENDPOINTS.items()):
        memory.clear()
        name = {"x-request-id": f"mine-{number}", "x-fair-client": "alice"}
        status, answered, _ = await c.post(path, asked | {"stream": stream}, headers={**headers, **name})
        assert status == 200
        [root] = await memory.trees(1)
        assert root.names() == [f"POST {path}", SERVED if stream else SERVED[:2]]
        assert (root.kind, root.service, root.failed) == ("SERVER", "sglang-fair-gateway", False)
        assert root.parent == (CALLER if headers else "")
        assert root.trace == TRACE or not headers
        assert root.attributes.items() >= {
            "http.response.status_code": 200,
            "gen_ai.request.model": MODEL,
            "gen_ai.usage.output_tokens": 3,
            "sglang_fair.request": f"mine-{number}",
            "sglang_fair.client": "alice",
            "sglang_fair.outcome": "ok",
        }.items()  # fmt: skip
        [attempt] = root.children
        assert attempt.kind == "CLIENT"
        assert attempt.attributes["sglang_fair.id"] == answered["x-fair-request-id"]
        assert attempt.attributes["sglang_fair.outcome"] == "ok"
        # What the replica makes itself is below the attempt.
        sent = c.replicas[0].requests[-1][1]
        assert sent["traceparent"] == f"00-{root.trace}-{attempt.id}-{sent['traceparent'][-2:]}"
        assert int(sent["traceparent"][-2:], 16) & 1
        assert sent.get("tracestate") == headers.get("tracestate")
        [told] = (await c.get(f"/explain/mine-{number}"))[1]["requests"]
        assert told["trace_id"] == root.trace
        assert told["attempts"][0]["worker"] == attempt.attributes["sglang_fair.worker"]


@pytest.mark.cluster(replicas=3)
async def test_each_attempt_is_there(memory: Memory, c: Cluster) -> None:
    c.replicas[0].mode, c.replicas[1].mode = "die", "503"
    status, _, _ = await c.post("/v1/completions", COMPLETION)
    assert status == 200
    [root] = await memory.trees(1)
    assert root.attributes["sglang_fair.retries"] == 2
    assert not root.failed
    first, second, third = root.below("attempt")
    assert [one.failed for one in (first, second, third)] == [True, True, False]
    assert "sglang_fair.reason" in first.attributes
    assert first.ended_ns <= second.began_ns <= second.ended_ns <= third.began_ns
    parents = [replica.requests[-1][1]["traceparent"].split("-")[2] for replica in c.replicas]
    assert parents == [first.id, second.id, third.id]


@pytest.fixture
def tenants(tmp_path: Path) -> Path:
    path = tmp_path / "tenants.yaml"
    add_tenant(path, "gold", limits=Limits(requests_per_minute=1))
    return path


async def test_what_is_refused_has_a_span_with_its_status(tenants: Path, memory: Memory, c: Cluster) -> None:
    async def ask(key: str, body: dict[str, Any]) -> int:
        headers = {"authorization": f"Bearer {key}"}
        return (await c.post("/v1/completions", body, headers=headers))[0]

    async def turn() -> bool:
        """Both requests of one minute: the second is refused."""
        memory.clear()
        return [await ask("gold", {"prompt": 7}), await ask("gold", COMPLETION)] == [400, 429]

    assert await ask("invented", COMPLETION) == 401
    await eventually(turn, "two requests in one minute")
    for root, status in zip(await memory.trees(2), (400, 429), strict=True):  # and none of who may not ask
        assert root.names() == ["POST /v1/completions"]
        assert root.attributes["http.response.status_code"] == status
        assert root.attributes["sglang_fair.outcome"] == "refused"
        assert root.attributes["sglang_fair.error"]
        assert not root.failed, "its client's fault is no error of a server"


@pytest.mark.cluster(replicas=0)
async def test_when_no_replica_is_there(memory: Memory, c: Cluster) -> None:
    assert (await c.post("/v1/completions", COMPLETION))[0] == 503
    [root] = await memory.trees(1)
    assert root.names() == ["POST /v1/completions", ["attempt", ["placement"]]]
    assert root.failed
    [attempt] = root.children
    assert attempt.failed
    assert attempt.attributes["sglang_fair.reason"] == "no worker is up"


# ---- who is sampled, and who lies


async def test_who_is_not_sampled_stays_so_at_the_replica(memory: Memory, c: Cluster) -> None:
    await c.post("/v1/completions", COMPLETION, headers=NOT_SAMPLED)
    sent = c.replicas[0].requests[-1][1]["traceparent"].split("-")
    assert (sent[1], int(sent[3], 16) & 1) == (TRACE, 0)
    assert sent[2] != CALLER
    await c.post("/v1/completions", COMPLETION)
    [root] = await memory.trees(1)
    assert root.trace != TRACE


async def test_headers_that_are_none_begin_a_trace_and_leave_no_line(
    memory: Memory, caplog: pytest.LogCaptureFixture, c: Cluster
) -> None:
    parents = (
        "x", "0" * 5000, f"00-{'0' * 32}-{CALLER}-01", f"00-{TRACE}-{CALLER}-01-more", f"ff-{TRACE}-{CALLER}-01",
        None,
    )  # fmt: skip
    for parent in parents:
        memory.clear()
        headers = {"tracestate": "vendor=1"} | ({"traceparent": parent} if parent else {})
        assert (await c.post("/v1/completions", COMPLETION, headers=headers))[0] == 200
        [root] = await memory.trees(1)
        assert root.trace != TRACE
        assert root.parent == ""
        assert "tracestate" not in c.replicas[0].requests[-1][1]
    for tracestate in ("=,=;" * 50, "a=1,a=2", "x" * 5000, ",".join(f"k{n}=1" for n in range(40))):
        headers = {**SAMPLED, "tracestate": tracestate}
        assert (await c.post("/v1/completions", COMPLETION, headers=headers))[0] == 200
    assert not [one for one in caplog.records if one.name.startswith("opentelemetry")]


async def test_no_text_is_in_a_span(memory: Memory, c: Cluster) -> None:
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


# ---- a collector that is away


async def test_a_gateway_that_ends_sends_what_it_has(
    tokenizer: Path, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "600000")
    async with cluster(tokenizer, access=ON) as c:
        assert (await c.post("/v1/completions", COMPLETION))[0] == 200
    root = tree(memory.nodes())
    assert root.names() == ["POST /v1/completions", ["attempt", ["placement"]]]


async def test_a_gateway_ends_soon_while_its_collector_is_silent(
    tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It accepts connections and says nothing."""
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "1")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        async with cluster(tokenizer, access={"otlp_traces_endpoint": url}) as c:
            made = c.gateway.tracing
            assert made is not None
            assert (await c.post("/v1/completions", COMPLETION))[0] == 200
            closing = asyncio.create_task(made.close())
            done, _ = await asyncio.wait([closing], timeout=10 * tracing.CLOSE_S)
            assert done, "the SDK would wait for thirty seconds"
    names = "OtelBatchSpanRecordProcessor"
    wait_until(lambda: names not in {one.name for one in threading.enumerate()}, "the SDK's thread")


# ---- off, and on


@pytest.mark.slow
def test_off_nothing_of_the_sdk_is_imported(tokenizer: Path) -> None:
    program = f"""
import sys
import router.__main__, router.gateway.__main__, sglang_fair.cluster.__main__, sglang_fair.cli
from router.gateway.app import create_app
from sglang_fair.settings import table
made = create_app(table.Gateway(port=1, router=("tcp://127.0.0.1:1",), model_name="tiny", tokenizer={str(tokenizer)!r}))
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


async def test_a_collector_gets_them_by_otlp_with_the_headers_of_the_environment(
    tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (
        ("BSP_SCHEDULE_DELAY", "10"), ("EXPORTER_OTLP_HEADERS", "x-key=secret"), ("SERVICE_NAME", "our-gateway"),
    ):  # fmt: skip
        monkeypatch.setenv(f"OTEL_{name}", value)
    with Collector() as collector:
        async with cluster(tokenizer, access={"otlp_traces_endpoint": collector.url}) as c:
            assert (await c.post("/v1/completions", COMPLETION, headers=SAMPLED))[0] == 200
            await eventually(lambda: len(collector.of(TRACE)) == 3, "all spans have come")
        root = tree(collector.of(TRACE), CALLER)
        assert root.service == "our-gateway"
        assert abs(root.began_ns / 1e9 - time.time()) < 3600, "since the epoch"
        assert (collector.path, collector.headers["x-key"]) == ("/v1/traces", "secret")


async def test_names_that_cannot_be_encoded_lose_no_other_span(tokenizer: Path) -> None:
    """A batch goes as a whole, so one bad name must not cost it."""
    with Collector() as collector:
        async with cluster(tokenizer, access={"otlp_traces_endpoint": collector.url}) as c:
            odd = COMPLETION | {"user": "\ud800", "model": f"{MODEL}:\ud800"}
            await c.post("/v1/completions", odd, headers=SAMPLED)
            headers = {"x-fair-client": "ä" * 300, "x-request-id": "x" * 100}
            await c.post("/v1/completions", COMPLETION, headers=headers)
        wait_until(lambda: len([n for n in collector.nodes if "POST" in n.name]) == 2, "both requests")
