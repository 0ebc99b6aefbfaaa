"""Tenants' limits: requests and tokens in a minute, tokens in a day, requests at a time.

Rule. Time is cut into minutes and days of UTC's clock, the same for all gateways. A request is counted when it comes.
Its tokens are charged once, however many replicas try it: the prompt, cached or not, when it has been counted and
before anybody computes it, and with it is held what the answer may have: `max_tokens`, or the tenant's longest answer;
for one of no named length `UNNAMED_TOKENS`, or what is left of the limit if that is less, but at least 1. What has been
answered is charged as it comes and takes from what is held; at the end the rest of that is given back. Where nobody
knows how much was computed, because a client has left before an answer in one piece, all that was held stays charged.
A request is refused, and nothing is charged for it, if it would exceed a limit. One that no replica has taken costs no
tokens.
Bound. What a window lets through exceeds its limit by no more than what answers have beyond that which was held for
them, because a running answer is not cut off: nothing with `output_tokens`, nor for a named length within the limit.
Leaks. At the turn of a window its limit begins anew, so two windows' worth may fall close together, and what is
answered behind it was not held there. Requests at a time are of one process. While the store does not answer, each
process counts by itself; what is given back goes to the counts that were charged, and is lost if those do not answer. A
store that has lost its counts is given back all the same what requests under way held.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from math import ceil
from typing import NamedTuple

from router.gateway.access.directory import Known
from router.gateway.errors import ApiError
from sglang_fair.settings.setting import SettingError
from sglang_fair.tenants.model import Limits

log = logging.getLogger("gateway")

MEMORY = "memory"
SCHEMES = ("redis://", "rediss://")

STORE_TIMEOUT_S = 0.5
"""A store that takes longer counts as not there."""
RETRY_S = 2.0
"""For so long after that it is not asked."""
COUNT_S = 1.0
"""Between two looks at what has been answered."""
BUSY_RETRY_S = 1
UNNAMED_TOKENS = 1024
"""Held for an answer whose length nobody has named."""
SWEEP_S = 60.0
"""Between two times that counts of windows long over are forgotten."""


class _Window(NamedTuple):
    """A limit of tokens or requests in a period."""

    name: str
    """In `x-ratelimit-*-NAME`."""
    seconds: int


REQUESTS = _Window("requests", 60)
TOKENS = _Window("tokens", 60)
TOKENS_OF_DAY = _Window("tokens-day", 86400)


def check_store(address: str) -> None:
    """Raises SettingError for an address at which no store can be."""
    if address != MEMORY and not address.startswith(SCHEMES):
        raise SettingError(
            f"--limit-store must be memory or redis://HOST:PORT/DB, not {address!r:.80}", "limit_store"
        )
    try:
        if address != MEMORY:
            _Remote(address)
    except ImportError:
        raise SettingError(
            "--limit-store: a Redis needs its client library: pip install 'sglang-fair[redis]'", "limit_store"
        ) from None
    except Exception as error:  # a port that is none
        raise SettingError(f"--limit-store: {error}", "limit_store") from None


class _Local:
    """The counts of this process."""

    def __init__(self, clock_s: Callable[[], float]) -> None:
        self._clock_s = clock_s
        self._counts: dict[str, tuple[int, float]] = {}
        """By key, each with the time at which it is forgotten."""
        self._sweep_at_s = 0.0

    def incr(self, key: str, expiry_s: int, amount: int) -> int:
        """The count, with `amount` in it."""
        now_s = self._clock_s()
        if now_s >= self._sweep_at_s:
            self._counts = {key: one for key, one in self._counts.items() if one[1] > now_s}
            self._sweep_at_s = now_s + SWEEP_S
        count, until_s = self._counts.get(key, (0, now_s + expiry_s))
        self._counts[key] = count + amount, until_s
        return count + amount


class _Remote:
    """A Redis. Its client library is imported where there is one."""

    def __init__(self, address: str) -> None:
        from redis.asyncio import ConnectionPool, Redis

        self._redis = Redis.from_pool(ConnectionPool.from_url(address))

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

    def __init__(self, address: str = MEMORY, clock_s: Callable[[], float] = time.time) -> None:
        """`address` is `memory` or that of a Redis. Raises as `check_store`."""
        check_store(address)
        self._local = _Local(clock_s)
        self._remote = None if address == MEMORY else _Remote(address)
        self._clock_s = clock_s
        self._silent_until_s = 0.0
        self._at_once: Counter[str] = Counter()
        self._open: set[Ticket] = set()
        self._settling: set[asyncio.Task[None]] = set()
        self.refused: Counter[str] = Counter()
        """Requests, by the limit that they would have exceeded."""
        self.store_failures = 0

    async def enter(self, known: Known) -> "Ticket | None":
        """A request of a tenant has come; None: it has no limits. `close` the ticket. Raises `ApiError` 429."""
        if known.tenant is None or known.tenant.limits == _NONE:
            return None
        ticket = Ticket(self, known.caller.client, known.tenant.limits)
        try:
            await ticket.enter()
        except BaseException:
            ticket.close(0)
            raise
        return ticket

    async def run(self) -> None:
        """Charges what has been answered, until it is cancelled."""
        while True:
            await asyncio.sleep(COUNT_S)
            for ticket in list(self._open):
                await ticket.count()

    async def close(self) -> None:
        """Waits until everything is charged, and leaves the store."""
        while self._settling:
            await asyncio.wait(self._settling)
        if self._remote is not None:
            await self._remote.close()

    def state(self) -> dict[str, object]:
        """As `/status` shows it."""
        return {
            "refused": dict(sorted(self.refused.items())),
            "at once": dict(self._at_once.most_common(10)),
            "store failures": self.store_failures,
        }

    # -- for tickets

    def take(self, tenant: str, most: int | None) -> bool:
        """Whether one more at a time is within the limit; if so it is counted."""
        if most is not None and self._at_once[tenant] >= most:
            return False
        self._at_once[tenant] += 1
        return True

    def give(self, tenant: str) -> None:
        """Undoes `take`."""
        self._at_once[tenant] -= 1
        if not self._at_once[tenant]:
            del self._at_once[tenant]

    def window(self, window: _Window) -> int:
        """The number of the window that it is."""
        return int(self._clock_s() // window.seconds)

    def left_s(self, window: _Window) -> int:
        """Until it ends; at least one second."""
        return max(1, ceil(window.seconds - self._clock_s() % window.seconds))

    async def charge(self, tenant: str, window: _Window, number: int, amount: int) -> "_Charged":
        """What the window has been charged in all, and where."""
        key, expiry_s = _key(tenant, window, number), 2 * window.seconds
        if self._remote is not None:
            used = await self._ask(self._remote, key, expiry_s, amount)
            if used is not None:
                return _Charged(used, True)
        return _Charged(self._local.incr(key, expiry_s, amount), False)

    async def give_back(
        self, tenant: str, window: _Window, number: int, amount: int, is_remote: bool
    ) -> int | None:
        """Undoes a charge where it was made. What the window has been charged since; None: it could not be undone."""
        key, expiry_s = _key(tenant, window, number), 2 * window.seconds
        if not is_remote:
            return self._local.incr(key, expiry_s, -amount)
        assert self._remote is not None
        return await self._ask(self._remote, key, expiry_s, -amount)

    async def _ask(self, store: _Remote, key: str, expiry_s: int, amount: int) -> int | None:
        """None: it does not answer, or has not lately."""
        if time.monotonic() < self._silent_until_s:
            return None
        try:
            async with asyncio.timeout(STORE_TIMEOUT_S):
                return await store.incr(key, expiry_s, amount)
        except Exception as error:  # the client library has errors of its own
            self.store_failures += 1
            self._silent_until_s = time.monotonic() + RETRY_S
            log.error("limits are counted by each process: the store does not answer: %r", error)
            return None

    async def left(self, tenant: str, limits: Limits) -> list[tuple[str, int, int | None, int | None]]:
        """The limits that there are: name, limit, what is left of it, and the seconds until it begins anew."""
        found: list[tuple[str, int, int | None, int | None]] = []
        for window, limit in (
            (REQUESTS, limits.requests_per_minute),
            (TOKENS, limits.tokens_per_minute),
            (TOKENS_OF_DAY, limits.tokens_per_day),
        ):
            if limit is not None:
                used = (await self.charge(tenant, window, self.window(window), 0)).used
                found.append((window.name, limit, max(0, limit - used), self.left_s(window)))
        if limits.concurrency is not None:
            left = max(0, limits.concurrency - self._at_once[tenant])
            found.append(("concurrency", limits.concurrency, left, None))
        for name, most in (("prompt-tokens", limits.prompt_tokens), ("output-tokens", limits.output_tokens)):
            if most is not None:
                found.append((name, most, None, None))
        return found

    def opened(self, ticket: "Ticket") -> None:
        """It is to be looked at now and then."""
        self._open.add(ticket)

    def forget(self, ticket: "Ticket") -> None:
        """It is over."""
        self._open.discard(ticket)

    def closed(self, ticket: "Ticket") -> None:
        """It has ended: what is left to do goes on in the background, whatever becomes of its request."""
        task = asyncio.create_task(ticket.settle())
        self._settling.add(task)
        task.add_done_callback(self._settling.discard)


_NONE = Limits()


class _Charged(NamedTuple):
    used: int
    is_remote: bool


def _key(tenant: str, window: _Window, number: int) -> str:
    return f"sglang-fair/{window.name}/{tenant}/{number}"


@dataclass
class _Account:
    """What one request has been charged in one kind of window."""

    window: _Window
    limit: int
    number: int = 0
    """The window in which it was admitted."""
    held: int = 0
    used: int = 0
    """What the window had been charged by then."""
    is_remote: bool = False
    """Where it was charged when it was admitted."""


@dataclass(eq=False)
class Ticket:
    """One request and what it is charged."""

    quotas: Quotas
    tenant: str
    limits: Limits
    headers: dict[str, str] = field(default_factory=dict)
    """For its answer: `x-ratelimit-*`."""
    answered: Callable[[], int] = lambda: 0
    """How many tokens have been answered by now."""
    _accounts: list[_Account] = field(default_factory=list)
    _charged: int = 0
    """Of what was answered."""
    _is_in: bool = False
    _is_closed: bool = False
    _work: "asyncio.Task[None] | None" = None
    _prompt_tokens: int = 0
    _last: int | None = 0
    _was_taken: bool = True

    async def enter(self) -> None:
        """Counts the request. Raises `ApiError` 429."""
        self._is_in = self.quotas.take(self.tenant, self.limits.concurrency)
        if not self._is_in:
            raise self._refusal("concurrency", f"{self.limits.concurrency} requests at a time", BUSY_RETRY_S)
        limit = self.limits.requests_per_minute
        if limit is not None:
            await self._shielded(self._take(_Account(REQUESTS, limit), 1))

    async def admit(self, prompt_tokens: int, most_output_tokens: int, unnamed: int = 0) -> None:
        """Charges the prompt, and holds what the answers may have, of which `unnamed` may be of any length. Raises
        `ApiError` 400 or 429."""
        longest = self.limits.prompt_tokens
        if longest is not None and prompt_tokens > longest:
            raise ApiError(
                400, f"the prompt has {prompt_tokens} tokens; you may send {longest}", code="prompt_too_large"
            )
        self._prompt_tokens = prompt_tokens
        await self._shielded(self._admit(most_output_tokens, unnamed))

    def close(self, output_tokens: int | None, *, was_taken: bool = True) -> None:
        """The request has ended with an answer of so many tokens; None: nobody knows. Only the first call counts.

        `was_taken`: a replica has had it.
        """
        if self._is_closed:
            return
        self._is_closed, self._last, self._was_taken = True, output_tokens, was_taken
        if self._is_in:
            self.quotas.give(self.tenant)
        if self._work is not None:  # else nothing was charged
            self.quotas.closed(self)

    async def count(self) -> None:
        """Charges what has been answered since the last time."""
        if not self._is_closed:
            await self._charge(self.answered())

    async def settle(self) -> None:
        """The last charge, and what is still held is given back."""
        assert self._work is not None
        await asyncio.gather(self._work, return_exceptions=True)
        self.quotas.forget(self)
        await self._charge(self._last or 0)
        if self._last is None and self._was_taken:
            return
        back = self._held()
        for account in self._accounts:
            amount = back[account.window] + (0 if self._was_taken else self._prompt_tokens)
            if amount and account.number == self.quotas.window(account.window):
                await self._give_back(account, amount)

    def _held(self) -> dict[_Window, int]:
        """What is still held, which is let go by that."""
        found = {account.window: account.held for account in self._accounts}
        for account in self._accounts:
            account.held = 0
        return found

    # -- inside

    async def _shielded(self, work: Coroutine[None, None, None]) -> None:
        """A client that leaves does not leave a charge behind that nobody knows of."""
        self._work = asyncio.create_task(work)
        await asyncio.shield(self._work)

    async def _admit(self, most_output_tokens: int, unnamed: int) -> None:
        prompt_tokens = self._prompt_tokens
        for window, limit in (
            (TOKENS_OF_DAY, self.limits.tokens_per_day),
            (TOKENS, self.limits.tokens_per_minute),
        ):
            if limit is None:
                continue
            if prompt_tokens > limit:
                text = f"the prompt has {prompt_tokens} tokens; you have {limit} in {_period(window)}"
                raise await self._undone(ApiError(400, text, code="prompt_too_large"))
            account = _Account(window, limit, held=min(most_output_tokens + unnamed, limit - prompt_tokens))
            try:
                await self._take(account, prompt_tokens + account.held)
            except ApiError as error:
                raise await self._undone(error) from None
            self._accounts.append(account)
        for account in self._accounts:
            await self._hold(account, unnamed * (UNNAMED_TOKENS - 1))
        if self._accounts:
            self.quotas.opened(self)

    async def _undone(self, error: ApiError) -> ApiError:
        """Gives back what other windows were charged."""
        accounts, self._accounts = self._accounts, []
        for account in accounts:
            await self._give_back(account, self._prompt_tokens + account.held)
        return error

    async def _take(self, account: _Account, amount: int) -> None:
        """Charges `amount`, or raises 429 and charges nothing."""
        window, limit = account.window, account.limit
        account.number = self.quotas.window(window)
        used, account.is_remote = await self.quotas.charge(self.tenant, window, account.number, amount)
        account.used, is_over = used, used > limit
        if is_over:
            given_back = await self._give_back(account, amount)
            used = used - amount if given_back is None else given_back
        self.headers |= {
            f"x-ratelimit-limit-{window.name}": str(limit),
            f"x-ratelimit-remaining-{window.name}": str(max(0, limit - used)),
            f"x-ratelimit-reset-{window.name}": f"{self.quotas.left_s(window)}s",
        }
        if is_over:
            unit = "requests" if window is REQUESTS else "tokens"
            text = f"{limit} {unit} in {_period(window)}; this one needs {amount}, {max(0, limit - used)} are left"
            raise self._refusal(window.name, text, self.quotas.left_s(window))

    async def _hold(self, account: _Account, wanted: int) -> None:
        """Holds `wanted` tokens more, or as many as were left."""
        more = min(wanted, account.limit - account.used)
        if more <= 0:
            return
        quotas, window, number = self.quotas, account.window, account.number
        used, is_remote = await quotas.charge(self.tenant, window, number, more)
        over = more if is_remote != account.is_remote else min(more, max(0, used - account.limit))
        if over:  # others have taken it meanwhile
            await quotas.give_back(self.tenant, window, number, over, is_remote)
        account.held += more - over

    async def _charge(self, output_tokens: int) -> None:
        more = output_tokens - self._charged
        if more <= 0:
            return
        self._charged = output_tokens
        charges = []  # decided at once: two of these may be under way
        for account in self._accounts:
            number, taken = self.quotas.window(account.window), 0
            if number == account.number:  # what was held stands in this window already
                taken = min(account.held, more)
                account.held -= taken
            charges.append((account, number, more - taken))
        for account, number, amount in charges:
            if amount:
                await self.quotas.charge(self.tenant, account.window, number, amount)

    async def _give_back(self, account: _Account, amount: int) -> int | None:
        return await self.quotas.give_back(
            self.tenant, account.window, account.number, amount, account.is_remote
        )

    def _refusal(self, limit: str, text: str, retry_after_s: int) -> ApiError:
        self.quotas.refused[limit] += 1
        return ApiError(
            429,
            f"you may have {text}",
            code="rate_limit_exceeded",
            retry_after_s=retry_after_s,
            headers=self.headers,
        )


def _period(window: _Window) -> str:
    return "a day" if window is TOKENS_OF_DAY else "a minute"
