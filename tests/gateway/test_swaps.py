"""Swaps at the gateway, over real sockets: what is cut goes on elsewhere, what comes to the wrong model asks again."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from zmq.asyncio import Context

from router.events import Agent, Exchange, decode_answer, encode
from router.wire import HEARTBEAT, HEARTBEAT_ANSWER
from tests.support.site import Seen, Site
from tests.support.stand_in import MODEL
from tests.support.waiting import eventually

OTHER = "other"
PROMPT = "a prompt of some words"
TOKENS = 60
PASSED_S = 2.0
"""That a stream has been under way, at least: longer than the router of a busy machine takes to place a request."""


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
async def site(
    tokenizer: Path, loaded: dict[str, str], *gateway_options: str, **options: Any
) -> AsyncIterator[tuple[Site, Says]]:
    made = Site(
        tokenizer,
        replicas=len(loaded),
        router_options=("--swap-finish", "0"),
        gateway_options=("--more-models", f"{OTHER}={tokenizer}", *gateway_options),
        **options,
    )
    async with made:
        says = Says(loaded)
        talking = asyncio.create_task(says.run(made.router_address))
        try:
            await made.start()

            async def are_known() -> bool:
                workers = (await made.state())["workers"]
                return {name: one["model"] for name, one in workers.items()} == loaded

            await eventually(are_known, "the router knows who has what")
            yield made, says
        finally:
            talking.cancel()
            await asyncio.gather(talking, return_exceptions=True)


async def swap(made: Site, worker: str, model: str) -> dict[str, Any]:
    async with made.http.post(
        made.gateway_urls[0] + "/swap", json={"worker": worker, "model": model}
    ) as response:
        assert response.status == 202
        return await response.json()


@pytest.mark.parametrize("kind", ["generate", "completions", "chat"])
async def test_a_stream_is_cut_and_goes_on_at_another_replica(kind: str, tokenizer: Path) -> None:
    """By its tokens; a greedy chat, which only could be repeated, finishes where it is."""

    async with site(tokenizer, {"r0": MODEL, "r1": MODEL}) as (made, says):
        await made.hold(10, "r0")
        seen = [Seen("c") for _ in range(4)]
        streams = [
            asyncio.create_task(made.stream(kind, f"{PROMPT} {at}", TOKENS, one, client=f"c{at}"))
            for at, one in enumerate(seen)
        ]
        await eventually(lambda: all(one.worker for one in seen), "all have begun")
        of_r0 = [one for one in seen if one.worker == "r0"]
        assert of_r0
        began = await swap(made, "r0", OTHER)
        assert (began["phase"], began["target"]) == ("empties", OTHER)
        must_cut = 0 if kind == "chat" else len(of_r0)

        async def are_cut() -> bool:
            return (await made.state())["gateway"]["cut"] == must_cut

        await eventually(are_cut, "what can go on is cut")
        await made.hold(None, "r0")
        await asyncio.gather(*streams)
        for at, one in enumerate(seen):
            assert not one.error
            assert one.text == made.expected(kind, f"{PROMPT} {at}", TOKENS)
        await eventually(lambda: "r0" in says.orders, "nothing is left: the agent has its order")
        assert says.orders["r0"].model == OTHER
        state = await made.state()
        assert state["gateway"]["cut"] == must_cut
        says.loaded["r0"], says.number["r0"] = OTHER, says.orders["r0"].number

        async def is_loaded() -> bool:
            return (await made.state())["workers"]["r0"]["model"] == OTHER

        await eventually(is_loaded, "the router hears it")
        await made.quiet()


async def test_a_stream_that_goes_on_is_as_urgent_as_a_new_one(tokenizer: Path) -> None:
    """Its first token has come: by its old deadline it would be late, and behind everybody."""

    async with site(tokenizer, {"r0": MODEL, "r1": MODEL}, "--slo-classes", '{"soon": 0.001}') as (
        made,
        _,
    ):
        await made.hold(TOKENS - 10)
        seen = Seen("c")
        stream = asyncio.create_task(made.stream("completion", PROMPT, TOKENS, seen))
        await eventually(lambda: bool(seen.text), "it has begun")
        await asyncio.sleep(PASSED_S)
        await swap(made, seen.worker, OTHER)
        await stream
        assert (seen.error, (await made.state())["gateway"]["cut"]) == ("", 1)
        async with made.http.get(made.gateway_urls[0] + "/requests") as response:
            [latest] = (await response.json())["requests"]
        async with made.http.get(made.gateway_urls[0] + f"/explain/{latest['id']}") as response:
            [told] = (await response.json())["requests"]
        began, went_on = (one["router"]["slo"]["left_s"] for one in told["attempts"])
        assert went_on > began - PASSED_S
        await made.quiet()


async def test_where_nobody_else_has_the_model_streams_finish(tokenizer: Path) -> None:
    async with site(tokenizer, {"r0": MODEL}) as (made, says):
        await made.hold(10, "r0")
        seen = Seen("c")
        stream = asyncio.create_task(made.stream("generate", PROMPT, TOKENS, seen))
        await eventually(lambda: bool(seen.worker), "it has begun")
        await swap(made, "r0", OTHER)
        before = says.answered["r0"]
        await eventually(lambda: says.answered["r0"] > before + 2, "the router has spoken to the agent")
        assert "r0" not in says.orders
        await made.hold(None, "r0")
        await stream
        assert seen.text == made.expected("generate", PROMPT, TOKENS)
        assert (await made.state())["gateway"]["cut"] == 0
        await eventually(lambda: "r0" in says.orders, "then the agent has its order")


async def test_a_replica_with_another_model_is_not_believed_and_the_router_asked_again(
    tokenizer: Path,
) -> None:
    """r0 is taken to have the other model, and has not: nobody is answered by it, and all are in the end."""

    loaded = {"r0": OTHER}
    async with site(tokenizer, loaded, replica_options=("--model", MODEL)) as (made, says):
        seen = Seen("c")
        stream = asyncio.create_task(made.stream("generate", PROMPT, 5, seen, model=MODEL))
        await stream
        assert seen.status == 503, "nobody has it, as far as is known"
        seen = Seen("c")
        stream = asyncio.create_task(made.stream("generate", PROMPT, 5, seen, model=OTHER))

        async def is_misdirected() -> bool:
            return (await made.work("r0"))["misdirected"] >= 2

        await eventually(is_misdirected, "it was asked more than once")
        assert (await made.work("r0"))["requests"] == 0
        says.loaded["r0"] = MODEL
        await stream
        assert seen.status == 503, "now the router knows better"
        seen = await made.stream("generate", PROMPT, 5, Seen("c"), model=MODEL)
        assert seen.text == made.expected("generate", PROMPT, 5)
