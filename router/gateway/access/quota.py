"""Tenants' limits: requests and tokens in a minute, tokens in a day, requests at a time.

Rule. Time is cut into minutes and days of UTC's clock, the same for all gateways. A request is counted when it comes.
Before it is computed it is charged, once, however many replicas try it, its prompt, cached or not, and what its answer
may have: `max_tokens`, or the tenant's longest answer; for one of no named length `UNNAMED_TOKENS`, or what is left of
the limit if that is less, but at least 1. A request is refused, and nothing is charged for it, if it would exceed a
limit. At its end the difference to what it had is given back, or charged. Where it is not known how much was computed,
because a client has left before an answer in one piece, the charge stays. What no replica has taken costs no tokens.
Bound. What a window lets through exceeds its limit by no more than what answers have beyond that which was charged for
them at first, because a running answer is not cut off: nothing with `output_tokens`, nor for a named length within the
limit. Of requests at a time never more than the limit are under way, in all gateways that share a store (`leases`).
Leaks. At the turn of a window its limit begins anew, so two windows' worth may fall close together, and what is left of
a charge in a window that is over is not given back. While the store does not answer, and without one, each process
counts by itself; what is given back goes to the counts that were charged, and is lost if those do
not answer. A store that has lost its counts is given back all the same what requests under way were charged.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from math import ceil
from typing import NamedTuple, TypeVar

from router.gateway.access.identity import Known
from router.gateway.access.leases import LEASE_S, Leases
from router.gateway.errors import ApiError
from sglang_fair.common.ids import new_id
from sglang_fair.settings.setting import SettingError
from sglang_fair.tenants.model import Limits

log = logging.getLogger("gateway")

Answer = TypeVar("Answer")

MEMORY = "memory"
SCHEMES = ("redis://", "rediss://")

STORE_TIMEOUT_S = 0.5
"""A store that takes longer counts as not there."""
RETRY_S = 2.0
"""For so long after that it is not asked."""
BUSY_RETRY_S = 1
UNNAMED_TOKENS = 1024
"""Charged for an answer whose length nobody has named."""
SWEEP_S = 60.0
"""Between two times that counts of windows long over are forgotten."""


class _Window(NamedTuple):
    """A limit in a period."""

    name: str
    """In `x-ratelimit-*-NAME`."""
    field: str
    """Of `Limits`."""
    seconds: int
    of: str
    """What it counts."""


REQUESTS = _Window("requests", "requests_per_minute", 60, "requests in a minute")
TOKENS = _Window("tokens", "tokens_per_minute", 60, "tokens in a minute")
TOKENS_OF_DAY = _Window("tokens-day", "tokens_per_day", 86400, "tokens in a day")


def check_store(address: str) -> None:
    """Raises SettingError for an address at which there cannot be a store."""
    if address == MEMORY:
        return
    text = f" must be memory or redis://HOST:PORT/DB, not {address!r:.80}"
    if address.startswith(SCHEMES):
        try:
            _Remote(address)
            return
        except ImportError:
            text = ": a Redis needs its client library: pip install 'sglang-fair[redis]'"
        except Exception as error:  # a port that is none
            text = f": {error}"
    raise SettingError(f"--limit-store{text}", "limit_store")


class _Local:
    """The counts of this process."""

    def __init__(self, clock_s: Callable[[], float]) -> None:
        self._clock_s = clock_s
        self._counts: dict[str, tuple[int, float]] = {}
        """By key, each with the time at which it is forgotten."""
        self._sweep_at_s = 0.0

    def incr(self, key: str, expiry_s: int, amount: int) -> int:
        now_s = self._clock_s()
        if now_s >= self._sweep_at_s:
            self._counts = {key: one for key, one in self._counts.items() if one[1] > now_s}
            self._sweep_at_s = now_s + SWEEP_S
        count, until_s = self._counts.get(key, (0, now_s + expiry_s))
        self._counts[key] = count + amount, until_s
        return count + amount


class _Remote:
    """A Redis. Its client library is imported where there is one."""

    def __init__(self, address: str, lease_s: float = LEASE_S) -> None:
        from redis.asyncio import ConnectionPool, Redis

        self._redis = Redis.from_pool(ConnectionPool.from_url(address))
        self.leases = Leases(self._redis, lease_s)

    async def incr(self, key: str, expiry_s: int, amount: int) -> int:
        async with self._redis.pipeline() as both:
            both.incrby(key, amount)
            both.expire(key, expiry_s)
            count, _ = await both.execute()
        return int(count)

    async def close(self) -> None:
        await self._redis.aclose()


class Quotas:
    """What tenants have used. Belongs to one event loop."""

    def __init__(
        self, address: str = MEMORY, clock_s: Callable[[], float] = time.time, lease_s: float = LEASE_S
    ) -> None:
        """`address` is `memory` or that of a Redis. Raises as `check_store`."""
        check_store(address)
        self._local = _Local(clock_s)
        self._remote = None if address == MEMORY else _Remote(address, lease_s)
        self._lease_s = lease_s
        self._leased: dict[str, dict[str, None]] = {}
        """By tenant, requests under way that are in its set, or will be with the next renewal."""
        self._renewing: asyncio.Task[None] | None = None
        self._clock_s = clock_s
        self._silent_until_s = 0.0
        self.at_once: Counter[str] = Counter()
        """Requests of each tenant that are under way."""
        self._settling: set[asyncio.Task[None]] = set()
        self.refused: Counter[str] = Counter()
        """Requests, by the limit that they would have exceeded."""
        self.store_failures = 0

    async def enter(self, known: Known) -> "Ticket | None":
        """A request of a tenant has come; None: it has no limits. `close` the ticket. Raises `ApiError` 429."""
        if known.tenant is None or not known.tenant.limits.model_fields_set:
            return None
        ticket = Ticket(self, known.caller.client, known.tenant.limits)
        try:
            await ticket.enter()
        except BaseException:
            ticket.close(0)
            raise
        return ticket

    async def close(self) -> None:
        """Waits until everything is charged, and leaves the store."""
        while self._settling:
            await asyncio.wait(self._settling)
        if self._renewing is not None:
            self._renewing.cancel()
        if self._remote is not None:
            await self._remote.close()

    def state(self) -> dict[str, object]:
        return {
            "refused": dict(sorted(self.refused.items())),
            "at once": dict((+self.at_once).most_common(10)),
            "store failures": self.store_failures,
        }

    # -- for tickets

    def window(self, window: _Window) -> int:
        return int(self._clock_s() // window.seconds)

    def left_s(self, window: _Window) -> int:
        """Until it ends; at least one second."""
        return max(1, ceil(window.seconds - self._clock_s() % window.seconds))

    async def add(self, charge: "Charge", amount: int) -> int | None:
        """What the window has been charged in all, with `amount` more. A charge stays where it was made; None: that
        store does not answer, and nothing has changed."""
        key = f"sglang-fair/{charge.window.name}/{charge.tenant}/{charge.number}"
        expiry_s, used = 2 * charge.window.seconds, None
        if self._remote is not None and charge.is_remote is not False:
            used = await self._ask(self._remote.incr, key, expiry_s, amount)
            if used is None and charge.is_remote:
                return None
        charge.is_remote = used is not None
        charge.amount += amount
        return self._local.incr(key, expiry_s, amount) if used is None else used

    async def correct(self, charge: "Charge", due: int) -> None:
        """The request is over and had `due`: what it had beyond its charge belongs to the present window."""
        number, more = self.window(charge.window), due - charge.amount
        if more > 0:
            await self.add(Charge(charge.tenant, charge.window, number), more)
        elif more and charge.number == number:
            await self.add(charge, more)

    async def take_place(self, tenant: str, request: str, limit: int) -> bool:
        """Whether fewer than `limit` requests of the tenant are under way elsewhere, as far as the store answers."""
        if self._remote is None:
            return True
        leases = self._remote.leases
        if self._renewing is None:
            self._renewing = asyncio.create_task(self._renew(leases))
        is_in = await self._ask(leases.enter, tenant, request, limit)
        if is_in is not False:
            self._leased.setdefault(tenant, {})[request] = None
        return is_in is not False

    async def give_place(self, tenant: str, request: str) -> None:
        """Of a request that `take_place` was asked for."""
        mine = self._leased.get(tenant)
        if self._remote is None or mine is None or request not in mine:
            return
        del mine[request]
        if not mine:
            del self._leased[tenant]
        await self._ask(self._remote.leases.leave, tenant, [request])

    async def _renew(self, leases: Leases) -> None:
        while True:
            await asyncio.sleep(self._lease_s / 3)
            for tenant, mine in list(self._leased.items()):
                known = list(mine)
                await self._ask(leases.renew, tenant, known)
                # One that has left meanwhile may have been renewed behind that.
                if gone := [one for one in known if one not in mine]:
                    await self._ask(leases.leave, tenant, gone)

    async def _ask(self, work: Callable[..., Awaitable[Answer]], *given: object) -> Answer | None:
        """What the store says; None: it does not answer, or has not lately."""
        if time.monotonic() < self._silent_until_s:
            return None
        try:
            async with asyncio.timeout(STORE_TIMEOUT_S):
                return await work(*given)
        except Exception as error:  # the client library has errors of its own
            self.store_failures += 1
            self._silent_until_s = time.monotonic() + RETRY_S
            log.error("limits are counted by each process: the store does not answer: %r", error)
            return None

    async def left(self, tenant: str, limits: Limits) -> list[tuple[str, int, int | None, int | None]]:
        """The limits that there are: name, limit, what is left of it, and the seconds until it begins anew."""
        found: list[tuple[str, int, int | None, int | None]] = []
        for window in (REQUESTS, TOKENS, TOKENS_OF_DAY):
            if (limit := getattr(limits, window.field)) is not None:
                used = await self.add(Charge(tenant, window, self.window(window)), 0) or 0
                found.append((window.name, limit, max(0, limit - used), self.left_s(window)))
        if limits.concurrency is not None:
            under_way = self.at_once[tenant]
            if self._remote is not None:
                under_way = max(under_way, await self._ask(self._remote.leases.count, tenant) or 0)
            left = max(0, limits.concurrency - under_way)
            found.append(("concurrency", limits.concurrency, left, None))
        for name, most in (("prompt-tokens", limits.prompt_tokens), ("output-tokens", limits.output_tokens)):
            if most is not None:
                found.append((name, most, None, None))
        return found

    @property
    def is_local(self) -> bool:
        """There is no other store than this process, and nobody is waited for."""
        return self._remote is None

    def settle(self, work: Coroutine[None, None, None]) -> None:
        """Done at once where nobody is waited for; else in the background, whatever becomes of its request."""
        if self.is_local:
            with suppress(StopIteration):
                work.send(None)
            return
        task = asyncio.create_task(work)
        self._settling.add(task)
        task.add_done_callback(self._settling.discard)


@dataclass
class Charge:
    """What one request has been charged in one window."""

    tenant: str
    window: _Window
    number: int
    amount: int = 0
    is_remote: bool | None = None
    """Where; None: not charged yet."""


class Ticket:
    """One request and what it is charged."""

    def __init__(self, quotas: Quotas, tenant: str, limits: Limits) -> None:
        self.headers: dict[str, str] = {}
        """For its answer: `x-ratelimit-*`."""
        self._quotas, self._tenant, self._limits = quotas, tenant, limits
        self._name = new_id()
        self._charges: list[Charge] = []
        """Of tokens."""
        self._prompt_tokens = 0
        self._is_in = self._is_closed = self._has_charged = False
        self._work: asyncio.Task[object] | None = None

    async def enter(self) -> None:
        """Counts the request. Raises `ApiError` 429."""
        limits, at_once, most = self._limits, self._quotas.at_once, self._limits.concurrency
        if most is not None and at_once[self._tenant] >= most:
            raise self._busy(most)
        self._is_in = True
        at_once[self._tenant] += 1
        if most is not None and not self._quotas.is_local:
            await self._shielded(self._take_place(most))
        if limits.requests_per_minute is not None:
            await self._shielded(self._take(REQUESTS, limits.requests_per_minute, 1, 1))

    async def admit(self, prompt_tokens: int, most_output_tokens: int, unnamed: int = 0) -> None:
        """Charges the prompt and what the answers may have, of which `unnamed` may be of any length. Raises `ApiError`
        400 or 429."""
        longest = self._limits.prompt_tokens
        if longest is not None and prompt_tokens > longest:
            raise ApiError(
                400, f"the prompt has {prompt_tokens} tokens; you may send {longest}", code="prompt_too_large"
            )
        self._prompt_tokens = prompt_tokens
        await self._shielded(self._admit(most_output_tokens, unnamed))

    def close(self, output_tokens: int | None, *, was_taken: bool = True) -> None:
        """The request has ended with an answer of so many tokens; None: it is not known. Only the first call counts.

        `was_taken`: a replica has had it.
        """
        if self._is_closed:
            return
        self._is_closed = True
        if self._is_in:
            self._quotas.at_once.subtract([self._tenant])
        if self._has_charged:
            self._quotas.settle(self._settle(output_tokens, was_taken))

    # -- inside

    async def _shielded(self, work: Coroutine[None, None, object]) -> None:
        """A client that leaves does not leave a charge behind that is not known of."""
        self._has_charged = True
        if self._quotas.is_local:
            await work
            return
        self._work = asyncio.create_task(work)
        await asyncio.shield(self._work)

    async def _admit(self, most_output_tokens: int, unnamed: int) -> None:
        prompt_tokens = self._prompt_tokens
        try:
            for window in (TOKENS_OF_DAY, TOKENS):
                if (limit := getattr(self._limits, window.field)) is None:
                    continue
                if prompt_tokens > limit:
                    text = f"the prompt has {prompt_tokens} tokens; you have {limit} {window.of}"
                    raise ApiError(400, text, code="prompt_too_large")
                least = min(prompt_tokens + most_output_tokens + unnamed, limit)
                self._charges.append(
                    await self._take(window, limit, least, least + unnamed * (UNNAMED_TOKENS - 1))
                )
        except ApiError:
            await self._correct(0)
            raise

    async def _take_place(self, most: int) -> None:
        if not await self._quotas.take_place(self._tenant, self._name, most):
            raise self._busy(most)

    def _busy(self, most: int) -> ApiError:
        return self._refusal("concurrency", f"{most} requests at a time", BUSY_RETRY_S)

    async def _settle(self, output_tokens: int | None, was_taken: bool) -> None:
        if self._work is not None:
            await asyncio.gather(self._work, return_exceptions=True)
        await self._quotas.give_place(self._tenant, self._name)
        if output_tokens is not None or not was_taken:
            await self._correct(self._prompt_tokens + (output_tokens or 0) if was_taken else 0)

    async def _correct(self, due: int) -> None:
        charges, self._charges = self._charges, []
        for charge in charges:
            await self._quotas.correct(charge, due)

    async def _take(self, window: _Window, limit: int, least: int, wanted: int) -> Charge:
        """Charges `wanted`, or what is left and at least `least`, or raises 429 and charges nothing."""
        quotas, wanted = self._quotas, max(least, min(wanted, limit))
        charge = Charge(self._tenant, window, quotas.window(window))
        used = await quotas.add(charge, wanted) or 0
        over = used - limit
        if over > 0:
            back = over if over <= wanted - least else wanted
            rest = await quotas.add(charge, -back)
            used = used - back if rest is None else rest
        left = max(0, limit - used)
        self.headers |= {
            f"x-ratelimit-limit-{window.name}": str(limit),
            f"x-ratelimit-remaining-{window.name}": str(left),
            f"x-ratelimit-reset-{window.name}": f"{quotas.left_s(window)}s",
        }
        if over > wanted - least:
            text = f"{limit} {window.of}; this one needs {least}, {left} are left"
            raise self._refusal(window.name, text, quotas.left_s(window))
        return charge

    def _refusal(self, limit: str, text: str, retry_after_s: int) -> ApiError:
        self._quotas.refused[limit] += 1
        text, headers = f"you may have {text}", self.headers
        return ApiError(429, text, code="rate_limit_exceeded", retry_after_s=retry_after_s, headers=headers)
