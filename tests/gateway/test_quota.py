"""Tenants' limits: every token is charged once, whatever becomes of the request, and no limit is exceeded by many."""

import asyncio
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from router.gateway.access import quota
from router.gateway.access.identity import Known
from router.gateway.access.quota import UNNAMED_TOKENS, Quotas, Ticket, check_store
from router.gateway.errors import ApiError
from sglang_fair.common.caller import Caller
from sglang_fair.settings.setting import SettingError
from sglang_fair.tenants.model import Limits, Tenant
from tests.support.budget import examples
from tests.support.ports import free_port
from tests.support.waiting import eventually

LIMIT = 1000


class Clock:
    """The time, which tests move."""

    def __init__(self) -> None:
        self.now_s = 1_700_000_040.0

    def __call__(self) -> float:
        return self.now_s


def known(name: str = "gold", **limits: int) -> Known:
    return Known(Tenant(limits=Limits(**limits)), Caller(name))


async def opened(quotas: Quotas, **limits: int) -> Ticket:
    ticket = await quotas.enter(known(**limits))
    assert ticket is not None
    return ticket


async def refused(work: Awaitable[object]) -> ApiError:
    with pytest.raises(ApiError) as found:
        await work
    return found.value


async def used(quotas: Quotas, name: str = "tokens") -> int:
    """What the present window has been charged."""
    window = {"tokens": 60, "tokens-day": 86400, "requests": 60}[name]
    number = int(quotas._clock_s() // window)
    return quotas._local.incr(f"sglang-fair/{name}/gold/{number}", 60, 0)


@asynccontextmanager
async def counting(clock: Clock) -> AsyncIterator[Quotas]:
    made = Quotas(clock_s=clock)
    yield made
    await made.close()
    assert made.state()["at once"] == {}


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def quotas(clock: Clock, runner: asyncio.Runner) -> Iterator[Quotas]:
    made = counting(clock)
    yield runner.run(made.__aenter__())
    runner.run(made.__aexit__(None, None, None))


async def test_requests_in_a_minute(quotas: Quotas, clock: Clock) -> None:
    for left in (2, 1, 0):
        ticket = await opened(quotas, requests_per_minute=3)
        assert ticket.headers["x-ratelimit-remaining-requests"] == str(left)
        ticket.close(0)
    clock.now_s += 20
    error = await refused(quotas.enter(known(requests_per_minute=3)))
    left_s = str(int(60 - clock.now_s % 60))
    assert (error.status, error.code, error.headers["retry-after"]) == (429, "rate_limit_exceeded", left_s)
    assert error.headers["x-ratelimit-reset-requests"] == f"{left_s}s"
    assert quotas.state()["refused"] == {"requests": 1}
    other = await quotas.enter(known("silver", requests_per_minute=3))
    assert other is not None
    other.close(0)
    clock.now_s += 60
    (await opened(quotas, requests_per_minute=3)).close(0)


async def test_requests_at_a_time(quotas: Quotas) -> None:
    first, second = [await opened(quotas, concurrency=2) for _ in range(2)]
    assert (await refused(quotas.enter(known(concurrency=2)))).headers["retry-after"] == "1"
    first.close(0)
    first.close(0)  # once is enough
    third = await opened(quotas, concurrency=2)
    assert (await refused(quotas.enter(known(concurrency=2)))).status == 429
    second.close(None)
    third.close(0)


async def test_the_longest_prompt_and_what_never_fits(quotas: Quotas) -> None:
    ticket = await opened(quotas, prompt_tokens=10)
    assert (await refused(ticket.admit(11, 0))).code == "prompt_too_large"
    ticket.close(0)
    ticket = await opened(quotas, tokens_per_minute=LIMIT, tokens_per_day=2 * LIMIT)
    error = await refused(ticket.admit(LIMIT + 1, 0))
    assert (error.status, error.code) == (400, "prompt_too_large")  # to try again would be in vain
    ticket.close(0)
    await quotas.close()
    assert await used(quotas) == await used(quotas, "tokens-day") == 0


async def test_a_refusal_charges_nothing(quotas: Quotas) -> None:
    limits = {"tokens_per_minute": LIMIT, "tokens_per_day": 10 * LIMIT}
    first = await opened(quotas, **limits)
    await first.admit(900, 50)
    for _ in range(20):
        ticket = await opened(quotas, **limits)
        assert (await refused(ticket.admit(51, 0))).status == 429
        ticket.close(0)
    await quotas.close()
    assert await used(quotas) == await used(quotas, "tokens-day") == 950
    assert quotas.state()["refused"] == {"tokens": 20}
    first.close(20)
    await quotas.close()
    assert await used(quotas) == await used(quotas, "tokens-day") == 920


@settings(max_examples=examples(60))
@given(
    requests=st.lists(
        st.tuples(
            st.integers(0, 400),  # prompt
            st.integers(0, 400),  # longest answer that it names, 0: none
            st.integers(0, 1200),  # answered
            st.sampled_from(["ends", "unknown", "not taken", "cancelled"]),
        ),
        max_size=12,
    )
)
async def test_every_token_is_charged_once(requests: list[tuple[int, int, int, str]]) -> None:
    """Within one window the charge is the prompts and the answers, of those that were admitted, to the token."""
    limits, due, due_today = {"tokens_per_minute": LIMIT, "tokens_per_day": 3 * LIMIT}, 0, 0
    async with counting(Clock()) as quotas:
        for prompt, named, answered, end in requests:
            answered = min(answered, named) if named else answered
            ticket = await opened(quotas, **limits)
            admitting = asyncio.create_task(ticket.admit(prompt, named, not named))
            if end == "cancelled":
                await asyncio.sleep(0)
                admitting.cancel()
                await asyncio.gather(admitting, return_exceptions=True)
                ticket.close(0, was_taken=False)
                await quotas.close()
            else:
                try:
                    await admitting
                except ApiError:
                    ticket.close(0)
                    await quotas.close()
                    assert (await used(quotas), await used(quotas, "tokens-day")) == (due, due_today)
                    continue
                charge = prompt + min(named or UNNAMED_TOKENS, LIMIT - prompt - (0 if named else due))
                today = prompt + min(named or UNNAMED_TOKENS, 3 * LIMIT - prompt - due_today)
                assert await used(quotas) == due + charge
                assert await used(quotas, "tokens-day") == due_today + today
                ticket.close(None if end == "unknown" else answered, was_taken=end != "not taken")
                ticket.close(answered)
                await quotas.close()
                if end != "unknown":
                    charge = today = prompt + answered if end == "ends" else 0
                due, due_today = due + charge, due_today + today
            assert (await used(quotas), await used(quotas, "tokens-day")) == (due, due_today)


@pytest.mark.parametrize(("named", "enter"), [(30, LIMIT // 37), (0, 1)])
async def test_a_limit_holds_against_many_at_once(quotas: Quotas, named: int, enter: int) -> None:
    """The adversary sends a thousand at the same moment, each with a longest answer, or none with one."""

    async def one() -> Ticket | None:
        ticket = await opened(quotas, tokens_per_minute=LIMIT)
        try:
            await ticket.admit(7, named, not named)
        except ApiError:
            ticket.close(0)
            return None
        return ticket

    admitted = [one for one in await asyncio.gather(*[one() for _ in range(1000)]) if one is not None]
    assert len(admitted) == enter
    for ticket in admitted:
        ticket.close(30)
    await quotas.close()
    assert await used(quotas) == enter * 37


@settings(max_examples=examples(100))
@given(
    st.sampled_from([LIMIT, 5 * LIMIT]),
    st.lists(
        st.tuples(
            st.integers(0, 400),  # prompt
            st.integers(0, 400),  # longest answer that it names, 0: none
            st.integers(0, 3000),  # answered
            st.integers(0, 10),  # how many others come while it runs
        ),
        max_size=20,
    ),
)
@example(LIMIT, [(10, 0, 110, 11)] * 12)
@example(5 * LIMIT, [(10, 0, 1100, 11)] * 12)
async def test_what_is_let_through_exceeds_the_limit_by_what_was_not_held_at_most(
    limit: int, requests: list[tuple[int, int, int, int]]
) -> None:
    """Requests that overlap in any way: the tokens of all that were admitted, whatever was charged meanwhile."""
    through = beyond = 0
    running: list[tuple[int, int, Ticket]] = []
    async with counting(Clock()) as quotas:
        for at, (prompt, named, answered, lasts) in enumerate(requests):
            for until, tokens, ticket in list(running):
                if until < at:
                    ticket.close(tokens)
                    running.remove((until, tokens, ticket))
            while quotas._settling:
                await asyncio.wait(quotas._settling)
            answered = min(answered, named) if named else answered
            left, ticket = limit - await used(quotas), await opened(quotas, tokens_per_minute=limit)
            try:
                await ticket.admit(prompt, named, not named)
            except ApiError:
                ticket.close(0)
                continue
            running.append((at + lasts, answered, ticket))
            through += prompt + answered
            beyond += max(0, answered - (named or min(UNNAMED_TOKENS, left - prompt)))
        for _, tokens, ticket in running:
            ticket.close(tokens)
    assert through <= limit + beyond


async def test_an_answer_over_two_minutes(quotas: Quotas, clock: Clock) -> None:
    short, long = [await opened(quotas, tokens_per_minute=LIMIT) for _ in range(2)]
    await short.admit(100, 500)
    await long.admit(100, 0)
    assert await used(quotas) == 700
    clock.now_s += 60
    short.close(450)
    long.close(250)
    await quotas.close()
    assert await used(quotas) == 250  # what it had beyond its charge
    clock.now_s -= 60
    assert await used(quotas) == 700  # that minute is over: nothing is given back


@pytest.mark.parametrize("address", ["redis:/x", "file:x", "", "redis://h:port"])
def test_what_is_no_store(address: str) -> None:
    with pytest.raises(SettingError, match="--limit-store"):
        check_store(address)


async def test_a_store_that_is_not_there_leaves_each_process_to_itself() -> None:
    pytest.importorskip("redis", reason="the client library of Redis is not installed")
    quotas = Quotas(f"redis://127.0.0.1:{free_port()}/0")
    (await opened(quotas, requests_per_minute=1)).close(0)
    assert (await refused(quotas.enter(known(requests_per_minute=1)))).status == 429
    assert quotas.state()["store failures"] == 1
    await quotas.close()


async def test_what_was_charged_here_is_given_back_here() -> None:
    """A store that comes back between a charge and its end is not given what it never had."""
    pytest.importorskip("redis", reason="the client library of Redis is not installed")

    class Store:
        def __init__(self) -> None:
            self.is_there, self.counts = False, Counter[str]()

        async def incr(self, key: str, expiry_s: int, amount: int) -> int:
            if not self.is_there:
                raise OSError("away")
            self.counts[key] += amount
            return self.counts[key]

        async def close(self) -> None:
            pass

    quotas = Quotas(f"redis://127.0.0.1:{free_port()}/0")
    store = Store()
    quotas._remote = store  # type: ignore[assignment]

    async def request(*, there_at_first: bool, there_at_last: bool) -> Counter[str]:
        before = Counter(store.counts)
        store.is_there, quotas._silent_until_s = there_at_first, 0.0
        ticket = await opened(quotas, tokens_per_day=10 * LIMIT)
        await ticket.admit(100, 500)
        store.is_there, quotas._silent_until_s = there_at_last, 0.0
        ticket.close(200)
        while quotas._settling:
            await asyncio.wait(quotas._settling)
        store.counts.subtract(before)
        changed, store.counts = store.counts, store.counts + before
        return changed

    assert set((await request(there_at_first=False, there_at_last=True)).values()) <= {0}
    assert await used(quotas, "tokens-day") == 300
    assert set((await request(there_at_first=True, there_at_last=False)).values()) == {600}
    assert await used(quotas, "tokens-day") == 300
    assert set((await request(there_at_first=True, there_at_last=True)).values()) == {300}
    await quotas.close()


needs_redis = pytest.mark.skipif(
    shutil.which("redis-server") is None, reason="Debian's redis-server is not installed"
)


@asynccontextmanager
async def redis(folder: Path) -> AsyncIterator[str]:
    """The address of a Redis that is empty. However busy this machine is, it counts as there."""
    pytest.importorskip("redis", reason="the client library of Redis is not installed")
    port = free_port()

    async def connects() -> bool:
        try:
            (await asyncio.open_connection("127.0.0.1", port))[1].close()
        except OSError:
            return False
        return True

    with subprocess.Popen(
        ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder)],
        stdout=subprocess.DEVNULL,
    ) as server:
        try:
            await eventually(connects, "Redis listens")
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(quota, "STORE_TIMEOUT_S", 30.0)
                yield f"redis://127.0.0.1:{port}/0"
        finally:
            server.kill()


@needs_redis
async def test_two_gateways_count_together_in_redis(tmp_path: Path) -> None:
    limits = {"tokens_per_day": LIMIT}
    async with redis(tmp_path) as address:
        one, other = Quotas(address), Quotas(address)
        first = await opened(one, **limits)
        await first.admit(500, 400)
        second = await opened(other, **limits)
        assert (await refused(second.admit(500, 0))).status == 429
        second.close(0)
        first.close(100)
        await asyncio.gather(one.close(), other.close())
        third = await opened(other, **limits)
        await third.admit(300, 0)
        assert third.headers["x-ratelimit-remaining-tokens-day"] == str(LIMIT - (500 + 100) - 300)
        third.close(0)
        await other.close()
        assert one.store_failures == other.store_failures == 0


async def settled(quotas: Quotas) -> None:
    while quotas._settling:
        await asyncio.wait(quotas._settling)


@needs_redis
async def test_requests_at_a_time_of_two_gateways(tmp_path: Path) -> None:
    """Many at the same moment; requests that end, and one whose client hangs up while it is counted."""
    limits, refusals = Limits(concurrency=5), set[tuple[int, str]]()

    async def one(quotas: Quotas) -> Ticket | None:
        try:
            return await quotas.enter(known(concurrency=5))
        except ApiError as error:
            refusals.add((error.status, error.headers["retry-after"]))
            return None

    async with redis(tmp_path) as address:
        both = Quotas(address), Quotas(address)
        for _ in range(3):
            came = await asyncio.gather(*[one(both[number % 2]) for number in range(40)])
            tickets = [ticket for ticket in came if ticket is not None]
            assert len(tickets) == 5
            assert refusals == {(429, "1")}
            for quotas in both:
                assert await quotas.left("gold", limits) == [("concurrency", 5, 0, None)]
            for ticket in tickets:
                ticket.close(0)
                ticket.close(0)
            leaving = asyncio.create_task(both[0].enter(known(concurrency=5)))
            await asyncio.sleep(0)
            leaving.cancel()
            await asyncio.gather(leaving, return_exceptions=True)
            await asyncio.gather(*map(settled, both))
            assert await both[1].left("gold", limits) == [("concurrency", 5, 5, None)]
        for quotas in both:
            assert quotas.store_failures == 0
            assert not quotas._leased
            await quotas.close()


HOLDS = """
import asyncio, sys
from router.gateway.access.identity import Caller, Known
from router.gateway.access.quota import Quotas
from sglang_fair.tenants.model import Limits, Tenant

async def hold():
    quotas = Quotas(sys.argv[1], lease_s=1.5)
    ticket = await quotas.enter(Known(Tenant(limits=Limits(concurrency=1)), Caller("gold")))
    print("in", flush=True)
    await asyncio.sleep(600)

asyncio.run(hold())
"""


@needs_redis
async def test_a_gateway_that_is_killed_gives_its_requests_back_when_their_leases_end(tmp_path: Path) -> None:
    """Until then they are renewed, also after the store has lost them."""
    async with redis(tmp_path) as address:
        quotas = Quotas(address)
        assert quotas._remote is not None
        store, key = quotas._remote._redis, "sglang-fair/at-once/gold"

        async def is_held() -> bool:
            return await quotas.left("gold", Limits(concurrency=1)) == [("concurrency", 1, 0, None)]

        with subprocess.Popen([sys.executable, "-c", HOLDS, address], stdout=subprocess.PIPE) as gateway:
            try:
                assert gateway.stdout is not None
                assert await asyncio.to_thread(gateway.stdout.readline) == b"in\n"
                [(request, ends)] = await store.zrange(key, 0, -1, withscores=True)

                async def is_renewed() -> bool:
                    return bool((await store.zscore(key, request) or 0) > ends)

                await eventually(is_renewed, "its lease is renewed")
                await store.flushall()
                await eventually(is_held, "what the store has lost is there again")
                assert (await refused(quotas.enter(known(concurrency=1)))).status == 429
            finally:
                gateway.kill()

        async def is_free() -> bool:
            return not await is_held()

        await eventually(is_free, "its lease has ended")
        (await opened(quotas, concurrency=1)).close(0)
        await quotas.close()
