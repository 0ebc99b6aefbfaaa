"""Swaps at the gateway, over real sockets: what is cut goes on elsewhere, what comes to the wrong model asks again."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from zmq.asyncio import Context

from router.events import Agent, Exchange, decode_answer, encode
from router.wire import HEARTBEAT, HEARTBEAT_ANSWER
from tests.gateway.clusters import MODEL, Cluster, stand_ins, text_of
from tests.support.site import Seen
from tests.support.waiting import eventually

OTHER = "other"
PROMPT = "a prompt of some words"
TOKENS = 60
PASSED_S = 1.0
"""That a stream has been under way, at least: longer than the router of a busy machine takes to place a request."""

pytestmark = pytest.mark.cluster(
    replicas=0,
    models=(OTHER,),
    access={"slo_classes": {"soon": 0.001}},
    router=lambda: {"swap_finish_s": 0.0},
)


class Says:
    """An agent of each replica, which says what a test wants."""

    def __init__(self, loaded: dict[str, str]) -> None:
        self.loaded = loaded
        self.number = dict.fromkeys(loaded, 0)
        self.answered = dict.fromkeys(loaded, 0)
        """How many of each one's heartbeats the router has answered."""
        self.orders: dict[str, Exchange] = {}

    async def run(self, address: str) -> None:
        with Context() as context, contextlib.ExitStack() as opened:
            sockets = {name: opened.enter_context(context.socket(zmq.DEALER)) for name in self.loaded}
            for socket in sockets.values():
                socket.setsockopt(zmq.LINGER, 0)
                socket.connect(address)
            while True:
                for name, socket in sockets.items():
                    report = Agent(
                        "?", name, self.loaded[name], self.number[name], swap_s={MODEL: 1.0, OTHER: 1.0}
                    )
                    await socket.send(HEARTBEAT)
                    await socket.send(encode(report))
                    while await socket.poll(10):
                        message = await socket.recv()
                        is_heartbeat = message == HEARTBEAT_ANSWER
                        self.answered[name] += is_heartbeat
                        answer = None if is_heartbeat else decode_answer(message)
                        if isinstance(answer, Exchange) and answer.number > self.number[name]:
                            self.orders[name] = answer


@contextlib.asynccontextmanager
async def speaking(c: Cluster, **loaded: str) -> AsyncIterator[Says]:
    """Agents, and a router that has heard them."""
    says = Says(loaded)
    talking = asyncio.create_task(says.run(c.router.endpoint))

    async def are_known() -> bool:
        return {name: one["model"] for name, one in (await c.state())["workers"].items()} == loaded

    await eventually(are_known, "the router knows who has what")
    try:
        yield says
    finally:
        talking.cancel()
        await asyncio.gather(talking, return_exceptions=True)


async def swap(c: Cluster, worker: str) -> dict[str, Any]:
    """It is to load the other model."""
    status, _, answer = await c.post("/swap", {"worker": worker, "model": OTHER})
    assert status == 202
    return json.loads(answer)


async def cut(c: Cluster) -> int:
    return (await c.state())["gateway"]["cut"]


@pytest.mark.parametrize("kind", ["generate", "completions", "chat"])
async def test_a_stream_is_cut_and_goes_on_at_another_replica(kind: str, tokenizer: Path, c: Cluster) -> None:
    async with stand_ins(c, tokenizer, MODEL, MODEL) as replicas, speaking(c, r0=MODEL, r1=MODEL) as says:
        replicas["r0"].hold(10)
        seen = [Seen() for _ in range(4)]
        streams = [
            asyncio.create_task(c.stream(kind, f"{PROMPT} {at}", TOKENS, one, client=f"c{at}"))
            for at, one in enumerate(seen)
        ]
        await eventually(lambda: all(one.worker for one in seen), "all have begun")
        of_r0 = [one for one in seen if one.worker == "r0"]
        assert of_r0
        began = await swap(c, "r0")
        assert (began["phase"], began["target"]) == ("empties", OTHER)
        must_cut = len(of_r0)

        async def are_cut() -> bool:
            return await cut(c) == must_cut

        await eventually(are_cut, "what can go on is cut")
        replicas["r0"].hold(None)
        await asyncio.gather(*streams)
        for at, one in enumerate(seen):
            assert not one.error
            assert one.text == text_of(tokenizer, kind, f"{PROMPT} {at}", TOKENS)
        await eventually(lambda: "r0" in says.orders, "nothing is left: the agent has its order")
        assert says.orders["r0"].model == OTHER
        assert await cut(c) == must_cut
        says.loaded["r0"], says.number["r0"] = OTHER, says.orders["r0"].number

        async def is_loaded() -> bool:
            return (await c.state())["workers"]["r0"]["model"] == OTHER

        await eventually(is_loaded, "the router hears it")
        await c.ended()


async def test_a_stream_that_goes_on_is_as_urgent_as_a_new_one(tokenizer: Path, c: Cluster) -> None:
    """Its first token has come: by its old deadline it would be late, and behind everybody."""
    async with stand_ins(c, tokenizer, MODEL, MODEL) as replicas, speaking(c, r0=MODEL, r1=MODEL):
        for one in replicas.values():
            one.hold(TOKENS - 10)
        seen = Seen()
        stream = asyncio.create_task(c.stream("completions", PROMPT, TOKENS, seen))
        await eventually(lambda: bool(seen.text), "it has begun")
        await asyncio.sleep(PASSED_S)
        await swap(c, seen.worker)
        await eventually(lambda: c.gateway.metrics.status()["cut"] == 1, "it is cut")
        for one in replicas.values():
            one.hold(None)
        await stream
        assert (seen.error, await cut(c)) == ("", 1)
        _, latest = await c.get("/requests")
        _, told = await c.get(f"/explain/{latest['requests'][0]['id']}")
        began, went_on = (one["router"]["slo"]["left_s"] for one in told["requests"][0]["attempts"])
        assert went_on > began - PASSED_S
        await c.ended()


async def test_a_replica_with_another_model_is_not_believed_and_the_router_asked_again(
    tokenizer: Path, c: Cluster
) -> None:
    """r0 is taken to have the other model, and has not: nobody is answered by it, and all are in the end."""

    async def ask(model: str) -> Seen:
        return await c.stream("generate", PROMPT, 5, Seen(), model=model)

    async with stand_ins(c, tokenizer, OTHER, has=MODEL) as replicas, speaking(c, r0=OTHER) as says:
        assert (await ask(MODEL)).status == 503, "nobody has it, as far as is known"
        asking = asyncio.create_task(ask(OTHER))
        work = replicas["r0"].work
        await eventually(lambda: work["misdirected"] >= 2, "it was asked more than once")
        assert work["requests"] == 0
        says.loaded["r0"] = MODEL
        assert (await asking).status == 503, "now the router knows better"
        assert (await ask(MODEL)).text == text_of(tokenizer, "generate", PROMPT, 5, salt=1)
