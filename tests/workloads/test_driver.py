"""The driver's wire and books, against a small server in this process. No model: tokens are made up."""

import asyncio
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from tests.support.stand_in import make_tokenizer
from tests.workloads.peer import Handler, Peer
from workloads import wire
from workloads.arrivals import GammaArrivals
from workloads.clients import Client
from workloads.driver import Driver, Endpoint
from workloads.programs import Call, PackedCodec, Program, TokenCodec, TreeOfThought
from workloads.records import Manifest, Records, Run
from workloads.session import Plan

LIMIT_S = 60.0
"""For what takes little time, on however busy a machine."""

BYTES = TokenCodec(lambda text: list(text.encode()))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def client(program: Callable[[int], Program], name: str = "a", rate: float = 1000.0, **more: Any) -> Client:
    return Client(name, program, GammaArrivals(rate, 0.0), seed="s", app="tot", **more)


def drive(
    handlers: Mapping[str, Handler],
    clients: list[Client],
    plan: Plan | None = None,
    kind: str = wire.GENERATE,
    path: Path | None = None,
    **driver: Any,
) -> Run:
    """One run against a server with these handlers."""

    async def main() -> Run:
        app = web.Application()
        for route, handler in handlers.items():
            app.router.add_route("*", route, handler)
        runner = web.AppRunner(app, handler_cancellation=True)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            replicas = dict.fromkeys(driver.pop("replicas", ()), url)
            with Records(path, Manifest("test", "none", {}, 1.0)) as records:
                once = plan or Plan(duration_s=1.0, programs_per_client=1, drain_s=LIMIT_S)
                endpoint = Endpoint(url, kind, **driver.pop("endpoint", {}))
                await Driver(endpoint, clients, once, records, replicas=replicas, **driver).run()
                return records.run
        finally:
            await runner.cleanup()

    return asyncio.run(main())


def tree(_: int) -> Program:
    return TreeOfThought(branches=2, height=2, thought_tokens=3).program(BYTES.encode("Why?"), BYTES)


@pytest.mark.parametrize("incremental", [False, True])
def test_a_tree_goes_over_the_wire_with_its_thoughts_identity_and_exact_counts(incremental, tokenizer):
    server = Peer(tokenizer, incremental=incremental)
    run = drive(server.handlers, [client(tree)], tag="@7")
    assert len(run.requests) == 6
    assert run.end is not None
    (program,) = run.programs
    assert (program.outcome, program.requests, program.failed) == ("ok", 6, 0)
    roots, leaves = server.bodies[:2], server.bodies[2:]
    paths = [[*root["input_ids"], *ids] for root in roots for ids in server.answers[:2]]
    for leaf in leaves:
        assert any(leaf["input_ids"][: len(path)] == path for path in paths), (
            "a thought's ids are in the path"
        )
    asked, sent = server.bodies[0]["sampling_params"], server.headers[0]
    assert asked == {"max_new_tokens": 3, "temperature": 0.0, "ignore_eos": True}
    named = [sent[f"x-fair-{name}"] for name in ("client", "app", "interaction", "stage")]
    assert named == ["a@7", "tot", "a@7-0", "plan"]
    for record in run.requests:
        assert (record.outcome, record.worker) == ("ok", "r1")
        assert (record.output_tokens, record.cached_tokens) == (3, 0)
        assert record.extend_tokens == record.prompt_tokens > 0
        assert [count for _, count in record.token_times] == [1, 2, 3]
        assert record.t_intended_s <= record.t_start_s <= record.t_first_token_s <= record.t_done_s


def one_call(_: int) -> Program:
    yield Call("Why?", 2, "ask")


async def refuse(_: web.Request) -> web.StreamResponse:
    return web.Response(status=503, text="full")


def says(text: str) -> Handler:
    """A server that ends its answer after this event."""

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(f"data: {text}\n\n".encode())
        return response

    return answer


COUNTS = {"prompt_tokens": 4, "cached_tokens": 0, "completion_tokens": 1, "finish_reason": None}
ABORTED = {
    "prompt_tokens": 4,
    "completion_tokens": 0,
    "finish_reason": {"type": "abort", "message": "too long"},
}


async def hang(request: web.Request) -> web.StreamResponse:
    await asyncio.sleep(30)
    return web.Response()


@pytest.mark.parametrize(
    ("handler", "timeout_s", "error"),
    [
        (refuse, LIMIT_S, "HTTP 503: full"),
        (says(json.dumps({"text": "x", "meta_info": COUNTS})), LIMIT_S, "ended before"),
        (says(json.dumps({"text": "", "meta_info": ABORTED})), LIMIT_S, "too long"),
        (says("{not json"), LIMIT_S, "DecodeError"),
        (hang, 0.1, "within 0.1 s"),
    ],
)
def test_every_way_to_fail_is_one_record_that_says_so(handler, timeout_s, error):
    run = drive({"/generate": handler}, [client(one_call)], endpoint={"timeout_s": timeout_s})
    (record,) = run.requests
    assert record.outcome == "failed"
    assert error in record.error
    assert [(program.outcome, program.failed) for program in run.programs] == [("failed", 1)]


@pytest.mark.parametrize("kind", [wire.CHAT, wire.COMPLETIONS])
@pytest.mark.parametrize("usage_in_every_event", [True, False])
def test_usage_counts_wherever_it_comes(kind, usage_in_every_event):
    answer, usage = wire.Answer(kind), {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4}}
    for count, word in enumerate(("To", "day"), start=1):
        choice = {"delta": {"content": word}} if kind == wire.CHAT else {"text": word}
        told = {"usage": {**usage, "completion_tokens": count}} if usage_in_every_event else {}
        answer.feed({"choices": [{**choice, "finish_reason": "length" if count == 2 else None}], **told})
    answer.feed({"choices": [], "usage": {**usage, "completion_tokens": 2}})
    counts = (answer.prompt_tokens, answer.cached_tokens, answer.output_tokens)
    assert (answer.text, answer.finished, *counts) == ("Today", True, 9, 4, 2)


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_thoughts_are_tokens_and_no_text(name):
    """The first token of a model that thinks first is a thought's."""
    answer = wire.Answer(wire.CHAT)
    answer.feed({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
    assert answer.output_tokens == 0
    answer.feed({"choices": [{"delta": {name: "Hm."}}]})
    assert (answer.output_tokens, answer.text) == (1, "")
    answer.feed({"choices": [{"delta": {"content": "Yes."}, "finish_reason": "stop"}]})
    assert (answer.output_tokens, answer.text, answer.finished) == (2, "Yes.", True)


def test_replicas_are_sampled_under_plain_names_and_lost_samples_are_counted(tokenizer):
    async def fair(_: web.Request) -> web.Response:
        account = {"service": 12.0, "waiting": 1, "running": 2, "deficit": -3}
        return web.json_response({"clients": {"a@1": account, "other": account}, "bound": 99.0})

    answer = {wire.PATHS[wire.GENERATE]: Peer(tokenizer, step_s=0.02).handlers["/generate"]}
    plan = Plan(0.05, 1, drain_s=LIMIT_S, sample_s=0.02)
    run = drive(answer | {"/fair": fair}, [client(tree)], plan, tag="@1", replicas=["r0", "r1"])
    assert {sample.worker for sample in run.samples} == {"r0", "r1"}
    assert run.samples[0].clients == {"a": {"service": 12.0, "waiting": 1, "running": 2}}
    assert run.samples[0].bound == 99.0
    assert run.end.lost_samples == 0

    lost = drive(answer | {"/fair": refuse}, [client(tree)], plan, replicas=["r0"])
    assert lost.samples == []
    assert lost.end.lost_samples >= 1


# ---- time


def test_of_many_tokens_the_first_and_the_last_are_on_time(tokenizer):
    def long_call(_: int) -> Program:
        yield Call("Why?", 20)

    plan = Plan(1.0, 1, drain_s=LIMIT_S, token_step_s=1e6)
    (record,) = drive(Peer(tokenizer).handlers, [client(long_call)], plan).requests
    assert [count for _, count in record.token_times] == [1, 20]
    assert record.t_first_token_s == record.token_times[0][0] < record.token_times[1][0]


# ---- who asks, and with what


def test_the_body_names_the_client_where_asked_to():
    bodies = []

    async def answer(request: web.Request) -> web.StreamResponse:
        bodies.append(await request.json())
        return web.Response(status=503)

    drive(
        {"/v1/completions": answer}, [client(one_call)], kind=wire.COMPLETIONS, endpoint={"user_field": True}
    )
    assert bodies[0]["user"] == "a"
    with pytest.raises(ValueError, match="no field for the user"):
        drive({"/generate": refuse}, [client(one_call)], endpoint={"user_field": True})


def test_packed_prompts_are_token_ids_on_the_wire_and_so_is_their_answer(tokenizer):
    codec, server = PackedCodec(), Peer(tokenizer)

    def packed(_: int) -> Program:
        return TreeOfThought(branches=1, height=2, thought_tokens=3).program(codec.encode("Why?"), codec)

    run = drive(server.handlers, [client(packed)])
    first, second = (body["input_ids"] for body in server.bodies)
    assert first[:4] == list(b"Why?")
    assert second[: len(first) + 3] == [*first, *server.answers[0]]
    assert [record.prompt_tokens for record in run.requests] == [len(first), len(second)]
