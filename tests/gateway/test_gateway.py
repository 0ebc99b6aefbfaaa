"""The gateway over real sockets: a real router in a thread, and replicas that speak SGLang's wire only."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import nullcontext
from pathlib import Path

import msgspec
import pytest
import yarl

from router.gateway.errors import ApiError
from router.gateway.request.call import Names
from router.gateway.request.intake import Intake, TokenizerError, Tokens
from router.gateway.request.parse import parse
from sglang_fair.common.identity import HEADER_ATTEMPT
from tests.gateway.clusters import (
    CHAT,
    COMPLETION,
    ENDPOINTS,
    GENERATE,
    MODEL,
    ROUTER_TIMEOUT_S,
    Cluster,
    FakeReplica,
    call,
    gateway_settings,
    held_router,
    listening,
)
from tests.support.apis import BODIES
from tests.support.waiting import eventually


def events(body: bytes) -> list[bytes]:
    assert body.endswith(b"\n\n")
    return [event.removeprefix(b"data: ") for event in body[:-2].split(b"\n\n")]


# -- answers


async def test_streams_are_passed_on_without_what_is_not_the_client_s(c: Cluster) -> None:
    for path, request in ENDPOINTS.items():
        status, headers, answer = await c.post(path, request | {"stream": True})
        assert (status, headers["x-fair-client"]) == (200, "anonymous")
        assert headers["content-type"].startswith("text/event-stream")
        *chunks, last = events(answer)
        assert last == b"[DONE]"
        assert len(chunks) == 3, "the usage event is not the client's"
        assert all(json.loads(chunk) for chunk in chunks)
    state = await c.ended(ok=3)
    assert state["counts"]["output_tokens"] == 3 * 3
    assert state["hits"]["measured_cached_tokens"] == 3 * 2


async def test_usage_is_shown_to_whom_asks(c: Cluster) -> None:
    options = {"include_usage": True, "continuous_usage_stats": False}
    for path in ("/v1/chat/completions", "/v1/completions"):
        _, _, answer = await c.post(path, ENDPOINTS[path] | {"stream": True, "stream_options": options})
        usage = json.loads(events(answer)[-2])
        assert usage["choices"] == []
        assert usage["usage"]["completion_tokens"] == 3
        assert c.replicas[0].body["stream_options"] == options
        await c.post(path, ENDPOINTS[path] | {"stream": True})
        assert c.replicas[0].body["stream_options"] == {"include_usage": True}
        await c.post(path, ENDPOINTS[path])
        assert "stream_options" not in c.replicas[0].body
    await c.ended(ok=6)


async def test_batches_and_samples_go_to_one_worker_whole(c: Cluster) -> None:
    batches = [
        ("/v1/completions", COMPLETION | {"prompt": ["a", "b"], "n": 2}),
        ("/v1/completions", COMPLETION | {"prompt": [[1, 2], [3]], "n": 2}),
        ("/v1/chat/completions", CHAT | {"n": 4}),
        ("/generate", GENERATE | {"text": ["a", "b", "c", "d"]}),
        ("/generate", {"input_ids": [[1], [2]], "sampling_params": {"n": 2}}),
    ]
    for path, request in batches:
        for stream in (False, True):
            status, _, answer = await c.post(path, request | {"stream": stream})
            assert (status, len(answer) > 0) == (200, True)
            rid = c.replicas[0].body["rid"]
            prompts = request.get("prompt") or request.get("text") or request.get("input_ids") or ""
            if isinstance(prompts, list):
                assert len(set(rid)) == len(prompts)
                assert {len(one) for one in rid} == {32}
            else:
                assert len(rid) == 32
    state = await c.ended(ok=10)
    assert state["counts"]["output_tokens"] == 10 * 4 * 3


async def test_the_router_is_told_the_tokens_that_the_replica_sees(tokenizer: Path, c: Cluster) -> None:
    arrived = listening(c)
    tokens = Tokens(tokenizer)._tokenizer
    long = "x" * 20_000
    await c.post("/v1/chat/completions", CHAT | {"max_completion_tokens": 7, "n": 2, "cache_salt": "s"})
    await c.post("/v1/completions", COMPLETION | {"prompt": long, "max_tokens": 9})
    await c.post("/v1/completions", COMPLETION | {"prompt": [5, 6, 7], "model": f"{MODEL}:lora"})
    await c.post("/generate", {"input_ids": [[1, 2], [3]]})
    expected = [
        [0, *tokens.encode("<user>hi\n<assistant>", add_special_tokens=False).ids],
        tokens.encode(long).ids,
        [5, 6, 7],
        [1, 2, 3],
    ]
    assert [list(memoryview(one.tokens).cast("I")) for one in arrived] == expected
    assert [one.max_output_tokens for one in arrived] == [14, 9, 0, 0]
    assert [one.namespace for one in arrived] == ["\x1fs\x1f", "", "lora\x1f\x1f", ""]
    assert len(long) == len(expected[1])
    await c.ended(ok=4)


async def test_nobody_outside_names_a_client_inside(c: Cluster) -> None:
    fair = {"fair": {"client": "mallory"}, "emu": 3}
    headers = {"x-fair-app": "judge", "x-fair-stage": "2", "x-fair-weight": "9", "x-tenant-id": "acme"}
    await c.post("/v1/chat/completions", CHAT | {"custom_params": fair, "rid": "mine"}, headers=headers)
    _, seen, request = c.replicas[0].requests[-1]
    assert request["custom_params"] == {"emu": 3}
    assert request["rid"] != "mine"
    assert (seen["x-fair-client"], seen["x-fair-app"], seen["x-fair-stage"]) == ("acme", "judge", "2")
    assert "x-fair-weight" not in seen
    assert "x-tenant-id" not in seen
    for sampling in ({"custom_params": fair}, [{"custom_params": fair}]):
        await c.post("/generate", {"text": ["a"], "sampling_params": sampling})
        assert "mallory" not in json.dumps(c.replicas[0].body)
    await c.post("/v1/chat/completions", CHAT | {"user": "zoë\r\nx-fair-app: evil"})
    assert c.replicas[0].requests[-1][1]["x-fair-client"] == "zo%C3%AB%0D%0Ax-fair-app: evil"
    await c.ended(ok=4)


# -- refusals


@pytest.mark.parametrize(
    ("path", "body", "status", "code"),
    [
        ("/v1/chat/completions", b"{no json", 400, "invalid_json"),
        ("/v1/chat/completions", b"\xff", 400, "invalid_json"),
        ("/v1/chat/completions", b"[1]", 400, "invalid_json"),
        ("/v1/chat/completions", CHAT | {"model": "gpt-9"}, 404, "model_not_found"),
        ("/v1/chat/completions", CHAT | {"model": 3}, 400, 400),
        ("/v1/chat/completions", CHAT | {"messages": []}, 400, "invalid_messages"),
        ("/v1/chat/completions", CHAT | {"messages": ["hi"]}, 400, "invalid_messages"),
        ("/v1/chat/completions", CHAT | {"stream": "yes"}, 400, 400),
        ("/v1/chat/completions", CHAT | {"n": 0}, 400, 400),
        ("/v1/chat/completions", CHAT | {"n": True}, 400, 400),
        ("/v1/chat/completions", CHAT | {"max_tokens": -1}, 400, 400),
        ("/v1/chat/completions", CHAT | {"user": {}}, 400, 400),
        ("/v1/chat/completions", CHAT | {"stream_options": 1}, 400, 400),
        ("/v1/chat/completions", CHAT | {"input_ids": ["a"]}, 400, "invalid_prompt"),
        ("/v1/completions", {"model": MODEL}, 400, "invalid_prompt"),
        ("/v1/completions", COMPLETION | {"prompt": []}, 400, "invalid_prompt"),
        ("/v1/completions", COMPLETION | {"prompt": ["a", 1]}, 400, "invalid_prompt"),
        ("/v1/completions", COMPLETION | {"prompt": [1, -1]}, 400, "invalid_prompt"),
        ("/v1/completions", COMPLETION | {"prompt": [[1], []]}, 400, "invalid_prompt"),
        ("/v1/completions", COMPLETION | {"prompt": ["a"] * 2000}, 400, "batch_too_large"),
        ("/generate", {}, 400, "invalid_prompt"),
        ("/generate", {"text": "a", "sampling_params": 3}, 400, 400),
        ("/generate", {"text": "a", "sampling_params": []}, 400, 400),
    ],
)
def test_a_bad_body_is_refused(path: str, body: object, status: int, code: object) -> None:
    kind = {"/v1/chat/completions": "chat", "/v1/completions": "completions", "/generate": "generate"}[path]
    with pytest.raises(ApiError) as caught:
        parse(kind, body if isinstance(body, bytes) else json.dumps(body).encode(), Names(MODEL))
    error = json.loads(caught.value.body())["error"]
    assert (caught.value.status, error["code"]) == (status, code)
    assert error["type"] == "invalid_request_error"
    assert error["message"]


@pytest.mark.cluster(max_body_bytes=4000)
async def test_refusals_over_http(caplog: pytest.LogCaptureFixture, c: Cluster) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(5):
            yield b"x" * 1000

    for path, sent, status, said in (
        ("/v1/chat/completions", {"data": b"{no json"}, 400, "invalid_json"),
        ("/v1/chat/completions", {"json": CHAT | {"model": "gpt-9"}}, 404, "model_not_found"),
        ("/v1/completions", {"data": b"x" * 5000}, 413, "body_too_large"),
        ("/v1/completions", {"data": pieces()}, 413, "body_too_large"),
        ("/v1/nothing", {"json": {}}, 404, "Not Found"),
    ):
        got, _, answer = await c.post(path, **sent)
        error = json.loads(answer)["error"]
        assert got == status
        assert said in (error["code"], error["message"])
    for path in ("/v1/completions", "/v1/line%0Abreak"):
        async with c.http.get(yarl.URL(c.url + path, encoded=True)) as response:
            assert (response.status, (await response.json())["error"]["message"]) == (404, "Not Found")
    assert not c.replicas[0].requests
    state = await c.ended(ok=0)
    assert state["gateway"]["refused"] == 4
    lines = [one for one in caplog.records if one.name == "gateway" and one.levelno == logging.WARNING]
    assert len(lines) == 4, "one line a refused request"


@pytest.mark.cluster(max_in_flight=8)
async def test_a_client_that_floods_leaves_room_to_the_others(c: Cluster) -> None:
    async def ask(client: str, **more: str) -> tuple[int, str]:
        headers = {"x-fair-client": client} if client else {}
        status, _, answer = await c.post("/v1/completions", COMPLETION | more, headers=headers)
        return status, "" if status == 200 else json.loads(answer)["error"]["message"]

    c.replicas[0].mode = "endless"
    flood = [asyncio.create_task(ask("flood")) for _ in range(12)]
    await eventually(lambda: sum(task.done() for task in flood) == 8, "eight are refused")
    refused = [task.result() for task in flood if task.done()]
    assert refused == [(429, "too many requests in flight: 4 of this client")] * 8
    await eventually(lambda: c.replicas[0].working == 4, "four are at work")
    c.replicas[0].mode = "ok"
    assert await asyncio.gather(ask("modest"), ask("meek"), ask("", user="mild")) == [(200, "")] * 3
    # One that is named in its body is so from there on.
    assert (await ask("", user="flood"))[0] == 429
    state = await c.state()
    assert state["gateway"]["in_flight_by_client"] == {"flood": 4}
    for task in flood:
        task.cancel()
    state = await c.ended(aborted=4, ok=3)
    assert (state["gateway"]["in_flight"], state["gateway"]["held_bytes"]) == (0, 0)


@pytest.mark.cluster(max_held_bytes=6000)
async def test_all_bodies_together_are_bounded(c: Cluster) -> None:
    c.replicas[0].mode = "endless"
    large = COMPLETION | {"prompt": "x" * 4000}
    first = asyncio.create_task(c.post("/v1/completions", large))
    await eventually(lambda: c.replicas[0].working, "the first request is at work")
    status, headers, answer = await c.post("/v1/completions", large)
    error = json.loads(answer)["error"]
    assert (status, headers["retry-after"]) == (429, "1")
    assert (error["code"], error["type"]) == ("overloaded", "rate_limit_error")
    c.replicas[0].mode = "ok"
    other = {"x-fair-client": "another"}
    assert (await c.post("/v1/completions", COMPLETION, headers=other))[0] == 200
    first.cancel()
    state = await c.ended(aborted=1, ok=1)
    assert (state["gateway"]["held_bytes"], state["gateway"]["refusals"]) == (0, {"429": 1})


# -- who may change the workers


WORKER = {"url": "http://127.0.0.1:1"}
NO_WORKERS: list[tuple[object, int, str]] = [
    *(
        (body, 400, "invalid_worker")
        for body in (
            b"{", {"url": "ftp://x"}, {"url": "http://127.0.0.1:1/path"}, WORKER | {"unknown": 1},
            WORKER | {"name": "a b"}, WORKER | {"replay": "tcp://x:1"}, WORKER | {"kv": "http://x:1"},
            WORKER | {"kv": "tcp://x"}, WORKER | {"kv": "inproc://router"}, WORKER | {"capacity": 0},
            WORKER | {"capacity": 5e-324}, WORKER | {"capacity": 1e30},
        )
    ),
    (WORKER, 400, "worker_not_ready"),
    (b" " * 5000, 413, "body_too_large"),
]  # fmt: skip


async def test_a_worker_that_is_none_is_refused(c: Cluster) -> None:
    as_json = {"content-type": "application/json"}
    for body, status, code in NO_WORKERS:
        sent = {"data": body, "headers": as_json} if isinstance(body, bytes) else {"json": body}
        got, _, answer = await c.post("/workers", **sent)
        assert (got, json.loads(answer)["error"]["code"]) == (status, code), body
    assert list((await c.state())["workers"]) == ["r0"]


async def test_a_worker_is_added_once(c: Cluster) -> None:
    url = c.replicas[0].url
    status, _, answer = await c.post("/workers", {"url": url})
    assert (status, json.loads(answer)["error"]["message"]) == (409, f"{url} is worker r0")
    status, _, answer = await c.post("/workers", {"url": url, "name": "r0", "capacity": 2})
    assert (status, json.loads(answer)["capacity"]) == (201, 2)
    other = FakeReplica()
    await other.start()
    status, _, answer = await c.post("/workers", {"url": other.url, "name": "r0"})
    assert (status, json.loads(answer)["error"]["message"]) == (409, f"worker r0 is at {url}")
    status, _, answer = await c.post("/workers", {"url": other.url})
    assert (status, json.loads(answer)["name"]) == (201, "r1")
    assert [row["state"] for row in (await c.get("/workers"))[1]["workers"]] == ["up", "up"]
    await other.close()


# -- clients that leave


@pytest.mark.parametrize("path", [*ENDPOINTS, "/v1/responses", "/v1/messages"])
@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_is_not_worked_for(path: str, stream: bool, c: Cluster) -> None:
    replica = c.replicas[0]
    replica.mode = "endless"
    if stream:
        async with c.http.post(c.url + path, json=BODIES[path] | {"stream": True}) as response:
            for _ in range(6):  # of some kinds the first have no token
                await response.content.readuntil(b"\n\n")
            response.close()
    else:
        asking = asyncio.create_task(c.post(path, BODIES[path]))
        await eventually(lambda: replica.working, "the replica is at work")
        asking.cancel()
    await eventually(lambda: not replica.working, "the replica has stopped")
    _, seen, body = replica.requests[-1]
    name = body.get("rid") or body.get("request_id") or seen[HEADER_ATTEMPT]
    if not stream or path in ENDPOINTS:
        await eventually(lambda: replica.aborted == [name], "the replica was told")
    state = await c.ended(aborted=1)
    assert state["gateway"]["left"] == 1
    if stream:
        assert state["counts"]["output_tokens"] > 0


async def test_every_part_of_a_batch_is_cancelled(c: Cluster) -> None:
    replica = c.replicas[0]
    replica.mode = "endless"
    for request in (COMPLETION | {"prompt": ["a", "b"]}, COMPLETION | {"n": 2}):
        replica.aborted.clear()
        async with c.http.post(c.url + "/v1/completions", json=request | {"stream": True}) as response:
            for _ in range(3):
                await response.content.readuntil(b"\n\n")
            response.close()
        # For samples: the ids that SGLang gave to them, as seen in the stream.
        samples = {replica.body["rid"], f"{0:032x}", f"{1:032x}"} if "n" in request else set()
        expected = samples or set(replica.body["rid"])
        await eventually(lambda: expected <= set(replica.aborted), "each part is cancelled")  # noqa: B023
    await c.ended(aborted=2)


async def test_a_client_that_leaves_while_its_body_is_on_the_way(c: Cluster) -> None:
    host, _, port = c.url.removeprefix("http://").partition(":")
    _, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
    await writer.drain()

    async def counted() -> bool:
        return (await c.state())["gateway"]["in_flight"] == 1

    await eventually(counted, "the request is being read")
    writer.close()
    await writer.wait_closed()
    state = await c.ended(ok=0)
    assert state["gateway"]["left"] == 1


# -- replicas that fail


@pytest.mark.parametrize("mode", ["die", "die after headers", "503", "refuse", "silent"])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.cluster(replicas=2, idle_timeout_s=1.0)
async def test_before_the_first_byte_another_replica_is_tried(mode: str, stream: bool, c: Cluster) -> None:
    if mode == "refuse":
        await c.replicas[0].close()
    elif mode == "die after headers" and not stream:
        c.replicas[0].mode = "die"
    else:
        c.replicas[0].mode = mode
    status, headers, answer = await c.post("/v1/chat/completions", CHAT | {"stream": stream})
    assert status == 200, answer
    assert headers["x-fair-worker"] == "r1"
    assert headers["x-fair-request-id"] == c.replicas[1].body["rid"]
    if stream:
        assert events(answer)[-1] == b"[DONE]"
    state = await c.ended(failed=1, ok=1)
    assert state["gateway"]["retried"] == 1
    if mode == "silent":
        await eventually(lambda: c.replicas[0].aborted == [c.replicas[0].body["rid"]], "it was cancelled")


@pytest.mark.parametrize("mode", ["die midway", "no end"])
@pytest.mark.parametrize("path", list(ENDPOINTS))
@pytest.mark.cluster(replicas=2)
async def test_after_the_first_byte_the_stream_ends_in_an_error(path: str, mode: str, c: Cluster) -> None:
    c.replicas[0].mode = mode
    status, _, answer = await c.post(path, ENDPOINTS[path] | {"stream": True})
    assert status == 200
    *chunks, last = events(answer)
    assert len(chunks) >= 2
    assert all("error" not in json.loads(chunk) for chunk in chunks)
    error = json.loads(last)["error"]
    assert (error["code"], error["type"]) == ("replica_lost", "service_unavailable_error")
    state = await c.ended(aborted=1)
    assert state["counts"]["output_tokens"] > 0
    assert len(c.replicas[1].requests) == 0, "what a client has begun to read is not begun again"


# -- the router fails


@pytest.mark.cluster(router_timeout_s=ROUTER_TIMEOUT_S)
async def test_a_router_that_does_not_answer(c: Cluster) -> None:
    await eventually(lambda: c.gateway.fleet.workers, "the gateway knows the worker")
    may_go_on = held_router(c)
    status, _, _ = await c.post("/v1/completions", COMPLETION)
    assert status == 200, "the gateway places by itself"
    may_go_on.set()
    await c.ended(failed=1)
    assert len(c.replicas[0].requests) == 1


@pytest.mark.cluster(replicas=0, router_timeout_s=ROUTER_TIMEOUT_S)
async def test_without_a_router_and_without_workers_the_client_is_told_to_come_back(c: Cluster) -> None:
    await c.lose_router()
    status, headers, answer = await c.post("/v1/completions", COMPLETION | {"stream": True})
    assert (status, headers["retry-after"]) == (503, "1")
    assert json.loads(answer)["error"]["code"] == "router_unavailable"
    assert (await c.get("/health"))[0] == 503


# -- pure parts


def test_settings_reach_worker_processes_whole() -> None:
    given = gateway_settings("tcp://x:1", Path("/t"), tries=1, idle_timeout_s=2.0, slo_classes={"soon": 1.0})
    assert msgspec.json.decode(msgspec.json.encode(given), type=type(given)) == given


def test_chats_that_the_template_refuses_are_routed_by_their_text(tokenizer: Path) -> None:
    tokens = Tokens(tokenizer)
    parts = [
        {"type": "text", "text": "a"},
        {"type": "image_url", "image_url": {}},
        {"type": "text", "text": "b"},
    ]
    ids = tokens.ids(call("chat", messages=[{"role": "user", "content": parts}]))
    assert tokens._tokenizer.decode(ids, skip_special_tokens=False) == "<s><user>a b\n<assistant>"
    prefix = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "so"}]
    ids = tokens.ids(call("chat", messages=prefix, continue_final_message=True))
    assert tokens._tokenizer.decode(ids, skip_special_tokens=False) == "<s><user>q\n<assistant>so"
    assert tokens.plain_chats == 0
    ids = tokens.ids(call("chat", messages=[{"content": "norole"}], chat_template_kwargs={"messages": 3}))
    assert tokens._tokenizer.decode(ids, skip_special_tokens=False) == "<s><>norole\n<assistant>"


def test_a_folder_without_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"has no tokenizer\.json"):
        Tokens(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        Tokens(tmp_path)


@pytest.mark.parametrize(
    ("config", "refused"),
    [
        ({"vocab_size": 300}, True),
        ({"text_config": {"vocab_size": 300}}, True),
        ({"vocab_size": "300"}, False),
    ],
)
async def test_ids_are_of_the_vocabulary_that_is_beside_the_tokenizer(
    tokenizer: Path, tmp_path: Path, config: dict[str, object], refused: bool
) -> None:
    (tmp_path / "tokenizer.json").write_bytes((tokenizer / "tokenizer.json").read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(config))
    intake = Intake({MODEL: Tokens(tmp_path)}, 1000, lambda _: None)
    await intake.parsed("completions", json.dumps({"prompt": [299]}).encode(), "a")
    body = json.dumps({"prompt": [300]}).encode()
    with pytest.raises(ApiError, match="299") if refused else nullcontext():
        await intake.parsed("completions", body, "a")
    intake.close()
