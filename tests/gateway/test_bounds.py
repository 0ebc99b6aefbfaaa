"""The gateway's bounds over real sockets: whatever one client sends, the others are served."""

import asyncio
import contextlib
import json
import threading
import time

import pytest

from router.gateway.replicas.connections import NoDescriptors
from router.gateway.request.chunks import ChunkedTokenizer
from router.gateway.request.parse import LARGE_BODY_BYTES, parse
from router.gateway.serving import LARGE_BYTES
from router.shared_limit import address_share
from sglang_fair.common.identity import bounded
from tests.gateway.clusters import CHAT, COMPLETION, DEADLINE_S, Cluster
from tests.support.stand_in import MODEL
from tests.support.waiting import eventually

pytestmark = pytest.mark.slow


def head(length: int, more: str = "") -> bytes:
    """Of a request with a body so long."""
    return f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {length}\r\n{more}\r\n".encode()


async def connect(
    c: Cluster, address: str = "127.0.0.1"
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection to the gateway from an address of this machine."""
    host, _, port = c.url.removeprefix("http://").partition(":")
    return await asyncio.open_connection(host, int(port), local_addr=(address, 0))


@pytest.mark.cluster(max_in_flight=8)
async def test_bodies_that_are_not_read_yet_count_for_their_address(c: Cluster) -> None:
    slow = [await connect(c, "127.0.0.2") for _ in range(8)]
    for _, writer in slow:
        writer.write(head(100) + b"{")
    await eventually(lambda: c.gateway.metrics.status()["refusals"].get("429") == 4, "it has its share")
    assert c.gateway.capacity.requests.most(9) == {"(127.0.0.2)": 4}
    for _ in range(3):
        status, headers, _ = await c.post("/v1/completions", COMPLETION | {"user": "modest"})
        assert (status, headers["x-fair-client"]) == (200, "modest")
    status, headers, _ = await c.post("/v1/completions", COMPLETION)
    assert (status, headers["x-fair-client"]) == (200, "anonymous")
    for _, writer in slow:
        writer.close()
    await c.ended(ok=4)
    assert (c.gateway.capacity.requests.taken, c.gateway.capacity.body_bytes.taken) == (0, 0)


@pytest.mark.parametrize(
    ("peer", "share"),
    [
        (("10.0.0.1", 5), "(10.0.0.1)"),
        (("2001:db8:1:2:3:4:5:6", 5, 0, 0), "(2001:db8:1:2::)"),
        (("2001:db8:1:2::9", 5, 0, 0), "(2001:db8:1:2::)"),
        (None, "()"),
    ],
)
def test_an_address_is_a_share_that_no_client_can_name(peer: tuple | None, share: str) -> None:
    assert address_share(peer) == share
    assert bounded(share) != share


@pytest.mark.cluster(body_timeout_s=0.2)
async def test_a_body_that_comes_piece_by_piece_has_an_end_too(c: Cluster) -> None:
    reader, writer = await connect(c)
    writer.write(head(1 << 20))
    answer = asyncio.create_task(reader.readline())
    async with asyncio.timeout(DEADLINE_S):
        while not answer.done():
            writer.write(b" ")
            await asyncio.sleep(0.02)
    assert b" 408 " in answer.result()
    writer.close()
    await c.ended(ok=0)


@pytest.mark.parametrize("sent", [b"", b"POST /v1/comp", b"\r\n"])
@pytest.mark.cluster(head_timeout_s=0.2)
async def test_a_connection_that_asks_nothing_is_closed(sent: bytes, c: Cluster) -> None:
    async with asyncio.timeout(DEADLINE_S):
        reader, writer = await connect(c)
        writer.write(sent)
        assert await reader.read() == b""
        writer.close()
        # The same after an answer.
        reader, writer = await connect(c)
        request = json.dumps(COMPLETION).encode()
        writer.write(head(len(request)) + request)
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        if sent:
            writer.write(sent)
            with contextlib.suppress(ConnectionError):
                await reader.read()
        writer.close()


@pytest.mark.cluster(head_timeout_s=0.1)
async def test_a_connection_that_is_at_work_is_not_closed(c: Cluster) -> None:
    c.replicas[0].mode = "endless"
    async with c.http.post(c.url + "/v1/completions", json=COMPLETION | {"stream": True}) as response:
        end = time.monotonic() + 0.5
        while time.monotonic() < end:
            await response.content.readuntil(b"\n\n")
        response.close()
    await c.ended(aborted=1)


@pytest.mark.cluster(max_connections=10)
async def test_connections_of_one_address_leave_room_to_the_others(c: Cluster) -> None:
    many = [await connect(c, "127.0.0.2") for _ in range(12)]
    refused = []
    async with asyncio.timeout(DEADLINE_S):
        while len(refused) < 7:
            refused = [one for one in many if one[0].at_eof() or one[0]._buffer]
            await asyncio.sleep(0.005)
        answer = await refused[0][0].read()
    assert answer.startswith(b"HTTP/1.1 429 ")
    assert b"\r\nretry-after: 1\r\n" in answer
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "overloaded"
    assert c.gateway.connection_bounds.open.held("(127.0.0.2)") == 5
    assert (await c.post("/v1/completions", COMPLETION))[0] == 200
    for _, writer in many:
        writer.close()
    await eventually(lambda: not c.gateway.connection_bounds.open.held("(127.0.0.2)"), "they are given back")


@pytest.mark.cluster(replicas=2)
async def test_without_a_file_to_open_the_gateway_is_at_fault(c: Cluster) -> None:
    async def none_left(_: object) -> None:
        raise NoDescriptors(24, "Too many open files")

    connecting, c.gateway.replicas.connections.connect = c.gateway.replicas.connections.connect, none_left  # type: ignore[assignment]
    for stream in (True, False, True):
        status, headers, answer = await c.post("/v1/completions", COMPLETION | {"stream": stream})
        assert (status, headers["retry-after"]) == (503, "1")
        assert json.loads(answer)["error"]["code"] == "overloaded"
    assert c.gateway.replicas.health.is_well("r0")
    assert c.gateway.metrics.status()["retried"] == 0
    c.gateway.replicas.connections.connect = connecting  # type: ignore[method-assign]
    assert (await c.post("/v1/completions", COMPLETION))[0] == 200
    await c.ended(failed=3, ok=1)


# -- long prompts


async def knows_context(c: Cluster, tokens: int | None) -> None:
    await eventually(
        lambda: c.gateway.replicas.context_tokens(MODEL) == tokens, f"a context of {tokens} tokens"
    )


@pytest.mark.cluster(context_tokens=100)
async def test_a_prompt_beyond_the_context_is_refused_before_it_is_placed(c: Cluster) -> None:
    await knows_context(c, 100)
    fits, over = "x" * 100, "x" * 101
    for path, request, param in (
        ("/v1/completions", {"prompt": over}, "prompt"),
        ("/v1/completions", {"prompt": [fits, over]}, "prompt"),
        ("/v1/completions", {"prompt": [7] * 101}, "prompt"),
        ("/v1/completions", {"prompt": [[7], [7] * 101]}, "prompt"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": fits}]}, "messages"),
        ("/v1/chat/completions", CHAT | {"input_ids": [7] * 101}, "input_ids"),
        ("/generate", {"text": "word " * 20_000}, "text"),
        ("/generate", {"input_ids": [7] * 101}, "input_ids"),
    ):
        status, _, answer = await c.post(path, request)
        assert status == 400, (path, request)
        assert json.loads(answer)["error"] == {
            "message": f"this model's maximum context length is 100 tokens, and `{param}` is longer",
            "type": "invalid_request_error",
            "param": param,
            "code": "context_length_exceeded",
        }
    assert not c.replicas[0].requests
    for request in ({"prompt": fits}, {"prompt": [fits] * 2}, {"prompt": [7] * 100}):
        assert (await c.post("/v1/completions", request))[0] == 200
    await c.ended(ok=3)


@pytest.mark.cluster(context_tokens=1000)
async def test_what_cannot_fit_is_not_tokenized(monkeypatch: pytest.MonkeyPatch, c: Cluster) -> None:
    await knows_context(c, 1000)
    tokenized: list[str] = []
    encode = ChunkedTokenizer._encode
    monkeypatch.setattr(
        ChunkedTokenizer, "_encode", lambda self, text: (tokenized.append(text), encode(self, text))[1]
    )
    # The longest of its tokens has three characters.
    assert (await c.post("/v1/completions", {"prompt": "x" * 3003}))[0] == 400
    assert (await c.post("/v1/completions", {"prompt": "some words " * 50_000}))[0] == 400
    assert not tokenized
    # Of what may fit by its length no more is tokenized than shows that it does not.
    text = " ".join(f"number {number} is" for number in range(200))
    assert 2000 < len(text) < 3000
    assert (await c.post("/v1/completions", {"prompt": text}))[0] == 400
    assert 1000 < sum(map(len, tokenized)) < 1600
    await c.ended(ok=0)


@pytest.mark.cluster(max_prompt_tokens=10_000)
async def test_without_a_known_context_the_replica_judges(c: Cluster) -> None:
    await eventually(lambda: c.gateway.replicas._contexts._answers, "the replica was asked for its models")
    assert c.gateway.replicas.context_tokens(MODEL) is None
    assert (await c.post("/v1/completions", {"prompt": "x" * 9000}))[0] == 200
    status, _, answer = await c.post("/v1/completions", {"prompt": ["x" * 21_000] * 2})
    assert (status, json.loads(answer)["error"]["code"]) == (400, "prompt_too_large")
    await c.ended(ok=1)


@pytest.mark.cluster(max_context_tokens=50)
async def test_an_operator_may_say_the_context(c: Cluster) -> None:
    assert (await c.post("/v1/completions", {"prompt": "x" * 51}))[0] == 400
    assert (await c.post("/v1/completions", {"prompt": "x" * 50}))[0] == 200


async def test_large_bodies_are_parsed_off_the_event_loop(
    monkeypatch: pytest.MonkeyPatch, c: Cluster
) -> None:
    threads: list[threading.Thread] = []
    monkeypatch.setattr(
        "router.gateway.request.intake.parse",
        lambda *given: (threads.append(threading.current_thread()), parse(*given))[1],
    )
    for size in (LARGE_BODY_BYTES // 2, LARGE_BODY_BYTES):
        assert (await c.post("/v1/completions", {"prompt": "x" * size}))[0] == 200
    assert [one is threading.main_thread() for one in threads] == [True, False]
    status, _, answer = await c.post(
        "/v1/completions", data=b'{"prompt":"x","more":[' + b",".join([b"[]"] * 300_000) + b"]}"
    )
    assert (status, json.loads(answer)["error"]["code"]) == (400, "too_many_values")
    assert len(threads) == 2
    await c.ended(ok=2)


@pytest.mark.parametrize(
    ("mode", "size", "taken", "code"),
    [
        ("silent", 10, 2, "replicas_ended"),
        ("silent", LARGE_BYTES, 1, "no_replica"),
        ("die", LARGE_BYTES, 2, "replicas_ended"),
    ],
)
@pytest.mark.cluster(replicas=4, tries=4, idle_timeout_s=0.3)
async def test_a_request_that_ends_replicas_is_given_to_two_at_most(
    mode: str, size: int, taken: int, code: str, c: Cluster
) -> None:
    for replica in c.replicas:
        replica.mode = mode
    status, _, answer = await c.post("/v1/completions", {"prompt": "x" * size})
    assert (status, json.loads(answer)["error"]["code"]) == (502, code)
    assert sum(len(replica.requests) for replica in c.replicas) == taken
    await c.ended(failed=taken)


async def test_a_replica_is_not_given_more_to_read_than_it_has_time_for(c: Cluster) -> None:
    has_read = asyncio.Event()

    async def asked(_: str) -> None:
        await has_read.wait()

    c.gateway.replicas._probe = asked  # type: ignore[method-assign]
    c.replicas[0].mode = "endless"
    large = {"prompt": "x" * 100_000}
    flood = [asyncio.create_task(c.post("/v1/completions", large)) for _ in range(8)]
    await eventually(lambda: c.gateway.fleet.in_flight["r0"] == 8, "all are placed")
    await eventually(lambda: c.replicas[0].working == 3, "a window is sent")
    await asyncio.sleep(0.05)
    assert c.replicas[0].working == 3
    has_read.set()
    await eventually(lambda: c.replicas[0].working == 8, "it has read all")
    for task in flood:
        task.cancel()
    await c.ended(aborted=8)
