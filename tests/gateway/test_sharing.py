"""What clients share of a gateway: its capacity, which is given back, and its threads, where they have turns."""

import asyncio
import contextlib
import gc
import itertools
import threading
import weakref
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.gateway.errors import ApiError
from router.gateway.sharing import STEPS_PER_TURN, Allowance, Capacity, FairThreadPool, RoundRobin
from tests.support.waiting import eventually

HOLDS = st.lists(
    st.one_of(
        st.tuples(st.just("hold"), st.integers(0, 120)), st.tuples(st.just("move"), st.sampled_from("abc"))
    ),
    max_size=8,
)


@given(st.lists(st.tuples(st.sampled_from("abc"), HOLDS), max_size=6))
def test_everything_is_given_back(requests: list[tuple[str, list[tuple[str, object]]]]) -> None:
    capacity = Capacity(max_in_flight=4, max_held_bytes=300, max_body_bytes=100)
    allowances = []
    for share, steps in requests:
        allowance = Allowance(capacity)
        allowances.append(allowance)
        with suppress(ApiError):
            allowance.enter(share)
            for what, value in steps:
                getattr(allowance, what)(value)
        assert capacity.requests.taken <= 4
        assert capacity.body_bytes.taken <= 300
    for allowance in allowances:
        allowance.release()
        allowance.release()
    assert (capacity.requests.taken, capacity.body_bytes.taken) == (0, 0)


def test_a_body_counts_once_and_moves_with_its_client() -> None:
    capacity = Capacity(max_in_flight=4, max_held_bytes=300, max_body_bytes=100)
    allowance = Allowance(capacity)
    allowance.enter("(127.0.0.1)")
    allowance.hold(60)
    allowance.hold(40)
    allowance.move("alice")
    assert (capacity.body_bytes.held("alice"), capacity.body_bytes.taken) == (60, 60)
    assert (capacity.requests.held("alice"), capacity.requests.taken) == (1, 1)
    with pytest.raises(ApiError, match="larger than 100 bytes"):
        allowance.hold(101)


CLIENTS = st.sampled_from("abcd")
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), CLIENTS), st.tuples(st.sampled_from(["next", "again", "remove"]), CLIENTS)
    ),
    max_size=80,
)


@given(STEPS)
def test_between_two_turns_of_one_client_all_others_that_wait_have_one(steps: list[tuple[str, str]]) -> None:
    turns: RoundRobin[int] = RoundRobin()
    waiting: defaultdict[str, list[int]] = defaultdict(list)
    number = itertools.count()
    passed: defaultdict[str, Counter[str]] = defaultdict(Counter)
    """Of each client that waits: who has had how many turns since it came or had its last."""
    for step, client in steps:
        if step == "add":
            one = next(number)
            turns.add(client, one)
            waiting[client].append(one)
        elif step == "remove":
            one = waiting[client][-1] if waiting[client] else -1
            assert turns.remove(client, one) == (one >= 0)
            del waiting[client][-1:]
        else:
            found = turns.next()
            if found is None:
                assert not any(waiting.values())
                continue
            client, one = found
            assert waiting[client].pop(0) == one, "in the order in which it came"
            passed.pop(client, None)
            for other in waiting:
                if waiting[other] and other != client:
                    passed[other][client] += 1
                    assert passed[other][client] == 1, "nobody has two turns while another waits"
            if step == "again":
                turns.again(client, one)
                waiting[client].insert(0, one)
        for other in list(passed):
            if not waiting[other]:
                del passed[other]
        assert len(turns) == sum(map(len, waiting.values()))


async def test_a_flood_of_long_work_does_not_hold_up_a_short_one() -> None:
    threads, ended = FairThreadPool(1), list[str]()

    def work(steps: int) -> Iterator[int]:
        yield from range(steps)

    async def ask(client: str, steps: int) -> None:
        made = await threads.run(client, work(steps))
        assert made == list(range(steps))
        ended.append(client)

    flood = [asyncio.create_task(ask("flood", 20 * STEPS_PER_TURN)) for _ in range(8)]
    await asyncio.sleep(0)
    await ask("modest", 2 * STEPS_PER_TURN)
    assert ended == ["modest"]
    await asyncio.gather(*flood)
    threads.close()


async def test_what_failed_work_held_is_let_go_without_the_collector() -> None:
    """The bodies of refused requests are large and few: they would stay for long."""

    class Body:
        pass

    def refused(body: Body) -> Iterator[Body]:
        yield body
        raise ValueError

    threads, body = FairThreadPool(1), Body()
    seen, work = weakref.ref(body), refused(body)
    del body
    gc.disable()
    try:
        with contextlib.suppress(ValueError):
            await threads.run("a", work)
        del work
        await eventually(lambda: seen() is None, "the end of the body", 5)
    finally:
        gc.enable()
        threads.close()


async def test_an_error_is_the_callers_and_whoever_leaves_is_worked_for_no_more() -> None:
    threads, going_on, begun = FairThreadPool(1), threading.Event(), threading.Event()
    turns = 0

    def wrong() -> Iterator[int]:
        yield 1
        raise ValueError("as told")

    def endless() -> Iterator[int]:
        nonlocal turns
        for number in itertools.count():
            turns = number // STEPS_PER_TURN
            begun.set()
            going_on.wait(60)
            yield number

    with pytest.raises(ValueError, match="as told"):
        await threads.run("a", wrong())
    running = asyncio.create_task(threads.run("a", endless()))
    while not begun.is_set():
        await asyncio.sleep(0.001)
    waiting = asyncio.create_task(threads.run("a", endless()))
    await asyncio.sleep(0)
    running.cancel()
    waiting.cancel()
    await asyncio.gather(running, waiting, return_exceptions=True)
    going_on.set()
    assert await threads.run("b", iter([7])) == [7]
    assert turns == 0, "the turn that was under way was the last"
    threads.close()
