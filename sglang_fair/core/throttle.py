"""OIT: throttling by overload and interaction (FairServe, section 3.1; Algorithm 1, lines 18-24).

Rule, for each call that comes: accepted while the cluster is not overloaded; accepted if its interaction is under way
(it waits in the queue instead); else refused if its user has had `user` calls within a minute; else refused if its user
has had as many of its app as the app allows; else accepted.

    overload    reported by the engines, never guessed: the pressure of a replica is its KV tokens in use and the
                uncached tokens that wait, over the size of its KV cache. A replica is overloaded from `high` until
                below `low`, and not if it has been silent for `SILENT_S`; a cluster is if all its replicas are.
                Where deadlines are planned, it also is while they will be missed within clients' shares
    counts      calls in a sliding minute. "accepted": those that were let in, so that a client which tries again
                locks no other one out. "arrivals": all that came, as the paper's text has it
    siblings    further calls of an interaction whose first call was refused are refused until that might come again,
                or half an interaction would get in

What is promised: nothing is refused without overload. A call of an interaction under way is never refused. While the
cluster is overloaded, a client is let in with at most its limit of first calls a minute, whatever it sends. A client
below its limits is never refused. No client's calls count against another one, unless `app_total` is set.

Each decision costs O(log clients). With `always`, limits hold whether or not there is overload, and for every call:
RPM, which the paper compares with.
"""

from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass
from math import inf
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from sglang_fair.common.identity import bounded
from sglang_fair.core.interactions import Interaction, Interactions
from sglang_fair.core.windows import Sliding

SILENT_S = 5.0
"""A replica that has reported nothing for so long counts as not overloaded."""

PREDICTED_S = 5.0
"""A prediction of missed deadlines holds for so long, unless it is repeated."""

LEAST_RETRY_S = 1.0

MOST_REMEMBERED = 100_000
"""Refused interactions that are remembered, users with limits of their own, and users and apps of which calls are
counted."""
MOST_SHOWN = 10_000
"""Of so many that called last the nearest to their limits are looked for."""

MOST_CALLS = 1_000_000_000
"""A minute. A limit beyond that is none."""

EVERY_APP = "*"

Counts = Literal["accepted", "arrivals"]
Own = tuple[int | None, int | None]
"""A client's own limits, of all its calls and of those of the app, in place of everybody's; None: it has none."""

K = TypeVar("K")
V = TypeVar("V")


class BadLoad(ValueError):
    """A load that no replica can have."""


HIGH, LOW = 0.95, 0.85
"""Pressure from which a replica is overloaded, and below which it no longer is."""

Calls = Annotated[int, Meta(ge=1, le=MOST_CALLS)]
Part = Annotated[float, Meta(gt=0, le=1)]


class Rules(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Calls a minute while overloaded. `user`: of one user over all apps. `apps`: of one user of an app; "*" stands for
    every app that is not named. None and what is missing: no limit. ValueError unless low < high.

    With `app_total`, an app's limit is that of all its users together (the paper's letter, where one user may use up
    what another needs).
    """

    user: Calls | None = None
    apps: dict[str, Calls] = {}
    app_total: bool = False
    counts: Counts = "accepted"
    high: Part = HIGH
    low: Part = LOW

    def __post_init__(self) -> None:
        if not self.low < self.high:
            raise ValueError(f"low must be below high, and {self.low!r} is not below {self.high!r}")

    def of_app(self, app: str) -> int | None:
        return self.apps.get(app, self.apps.get(EVERY_APP))

    def to_json(self) -> dict[str, Any]:
        """As `make_rules` reads it."""
        found: dict[str, Any] = msgspec.to_builtins(self)
        return found


def make_rules(content: Any, where: str) -> Rules:
    """The rules in the JSON `content` of `where`: `{"user": 60, "apps": {"chat": 30, "*": 60}}`, and `app_total`,
    `counts`, `high`, `low` where they differ from the defaults. ValueError, in one line that names `where` and the key,
    for anything else."""
    try:
        rules = msgspec.convert(content, Rules)
    except msgspec.ValidationError as error:
        raise ValueError(f"{where}: {error}") from None
    return replace(rules, apps={bounded(app): limit for app, limit in rules.apps.items()})


Code = Literal["throttled_user", "throttled_app"]
USER: Code = "throttled_user"
APP: Code = "throttled_app"


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a call is refused, and when another may be let in."""

    code: Code
    retry_after_s: float
    reason: str


@dataclass(slots=True)
class _Worker:
    pressure: float
    reported_s: float
    since_s: float
    """Since when it has been overloaded, if it is."""


class Overload:
    """Which replicas are overloaded: from pressure `high` until below `low`."""

    def __init__(self, high: float = HIGH, low: float = LOW) -> None:
        self.high, self.low = high, low
        self._workers: dict[str, _Worker] = {}
        self._overloaded: OrderedDict[str, _Worker] = OrderedDict()
        """Those that are; the one that has been silent for longest first."""
        self._predicted: dict[str, float] = {}
        """Since when it is predicted of each, and when it was last."""
        self._predicted_s = -inf

    def report(
        self, worker: str, used_tokens: int, waiting_tokens: int, size_tokens: int, now_s: float
    ) -> None:
        """`worker` has `used_tokens` of a KV cache of `size_tokens` in use, and `waiting_tokens` wait that are not
        cached. Raises `BadLoad` for numbers that cannot be."""
        if size_tokens < 1 or waiting_tokens < 0 or not 0 <= used_tokens <= 2 * size_tokens:
            raise BadLoad(f"{used_tokens} used and {waiting_tokens} waiting of {size_tokens} tokens")
        pressure = (used_tokens + waiting_tokens) / size_tokens
        self._drop_silent(now_s)
        was = self._overloaded.pop(worker, None)
        known = _Worker(pressure, now_s, now_s if was is None else was.since_s)
        if pressure >= (self.high if was is None else self.low):
            self._overloaded[worker] = known
        self._workers[worker] = known

    def predict(self, workers: Collection[str], now_s: float) -> None:
        """At these, and no others, clients within their share will miss deadlines in whatever order they are served. It
        holds for `PREDICTED_S`. Those that stand in for one of them are then overloaded, too."""
        before = self._predicted if now_s - self._predicted_s < PREDICTED_S else {}
        self._predicted = {worker: before.get(worker, now_s) for worker in workers}
        self._predicted_s = now_s

    def is_predicted(self, workers: Collection[str], now_s: float) -> bool:
        """Whether that holds for any of `workers`."""
        holds = self._predicted and now_s - self._predicted_s < PREDICTED_S
        return bool(holds) and any(worker in self._predicted for worker in workers)

    def forget(self, worker: str) -> None:
        """`worker` is gone."""
        self._workers.pop(worker, None)
        self._overloaded.pop(worker, None)

    def pressure(self, workers: Collection[str], now_s: float) -> float:
        """The least of `workers`; 0 if one of them is silent, or there are none."""
        return min((self._pressure(worker, now_s) for worker in workers), default=0.0)

    def is_overloaded(self, workers: Collection[str], now_s: float) -> bool:
        """Whether all of `workers`, which take requests, are. O(workers) at most."""
        return self.overloaded_since_s(workers, now_s) is not None

    def overloaded_since_s(self, workers: Collection[str], now_s: float) -> float | None:
        """Since when each of `workers` has been overloaded; None: not all of them are."""
        overloaded, since_s = self._overloaded, list[float]()
        self._drop_silent(now_s)
        if 0 < len(workers) <= len(overloaded) and all(map(overloaded.__contains__, workers)):
            since_s.append(max(overloaded[worker].since_s for worker in workers))
        if self.is_predicted(workers, now_s):
            since_s.append(min(self._predicted.get(worker, now_s) for worker in workers))
        return min(since_s, default=None)

    def _drop_silent(self, now_s: float) -> None:
        overloaded = self._overloaded
        while overloaded and now_s - next(iter(overloaded.values())).reported_s >= SILENT_S:
            overloaded.popitem(last=False)

    def _pressure(self, worker: str, now_s: float) -> float:
        known = self._workers.get(worker)
        return known.pressure if known is not None and now_s - known.reported_s < SILENT_S else 0.0


class Throttle:
    """Lets calls in or refuses them, by `rules`."""

    def __init__(self, rules: Rules, *, always: bool = False) -> None:
        self.rules = rules
        self.always = always
        self.interactions = Interactions()
        self.overload = Overload(rules.high, rules.low)
        self.refused: dict[str, int] = {USER: 0, APP: 0}
        self._now_s = -inf
        self._had: Sliding[str | tuple[str, str]] = Sliding(MOST_REMEMBERED)
        """Calls of users, and of each in an app."""
        self._siblings: OrderedDict[Interaction, tuple[float, Refusal]] = OrderedDict()
        """Refused interactions, and until when."""
        self._own: OrderedDict[str, int] = OrderedDict()
        """Users' own limits, as their last calls had them; the latest `MOST_REMEMBERED`."""

    def follow(self, rules: Rules) -> None:
        """From now on these hold. What was counted stays."""
        self.rules = rules
        self.overload.high, self.overload.low = rules.high, rules.low

    def judge(
        self,
        name: Interaction,
        workers: Collection[str],
        now_s: float,
        *,
        begun: int = 0,
        own: Own = (None, None),
    ) -> int | Refusal:
        """A call came: its number in its interaction, and it is let in; or why it is refused. Once for each call.
        `workers` are those that take requests."""
        self._now_s = now_s = max(self._now_s, now_s)
        self._had.tick(now_s)
        self.interactions.tick(now_s)
        if own[0] is not None:
            _remember(self._own, name.client, own[0])
        app = "" if self.rules.app_total else name.client, name.app
        if self.rules.counts == "arrivals":
            self._had.count(name.client, app)
        number = 0 if self.always else self.interactions.go_on(name, begun)
        if not number:
            if self.always or self.overload.is_overloaded(workers, now_s):
                refusal = self._refusal(name, app, workers, own)
                if refusal is not None:
                    self.refused[refusal.code] += 1
                    return refusal
            number = self.interactions.accept(name, begun)
        if self.rules.counts == "accepted":
            self._had.count(name.client, app)
        if self._siblings:
            self._siblings.pop(name, None)
        return number

    def nearest(self, now_s: float, most: int = 10) -> list[tuple[str, int, int | None]]:
        """The users nearest their limit: their calls within the last minute, and the limit."""
        self._had.tick(now_s)
        counts = self._had.latest_counts(MOST_SHOWN).items()
        users = [(user, calls) for user, calls in counts if isinstance(user, str)]
        found = [(user, calls, self._own.get(user, self.rules.user)) for user, calls in users]
        return sorted(found, key=lambda row: (-row[1] / (row[2] or inf), -row[1], row[0]))[:most]

    def _refusal(
        self, name: Interaction, app: tuple[str, str], workers: Collection[str], own: Own
    ) -> Refusal | None:
        while self._siblings and next(iter(self._siblings.values()))[0] <= self._now_s:
            self._siblings.popitem(last=False)
        earlier = None if self.always else self._siblings.get(name)
        if earlier is not None and earlier[0] > self._now_s:
            until_s, first = earlier
            return Refusal(first.code, max(LEAST_RETRY_S, until_s - self._now_s), first.reason)
        found = self._over(name, app, workers, own)
        if found is not None and name.id and not self.always:
            _remember(self._siblings, name, (self._now_s + found.retry_after_s, found))
        return found

    def _over(
        self, name: Interaction, app: tuple[str, str], workers: Collection[str], own: Own
    ) -> Refusal | None:
        # With "arrivals" this call has been counted already: it may be the last one within the limit.
        more = 1 if self.rules.counts == "arrivals" else 0
        of_user = self.rules.user if own[0] is None else own[0]
        of_app = self.rules.of_app(name.app) if own[1] is None else own[1]
        app_whose = "this app" if self.rules.app_total else "this client in this app"
        for code, key, limit, whose, its in (
            (USER, name.client, of_user, "this client", "its"),
            (APP, app, of_app, app_whose, "the"),
        ):
            if limit is None:
                continue
            opens_s = self._had.opens_s(key, limit + more)
            if opens_s > self._now_s:
                had = self._had.count_of(key)
                reason = f"{whose} has had {had} calls within a minute; {its} limit is {limit}"
                wait_s = max(LEAST_RETRY_S, opens_s - self._now_s)
                return Refusal(code, wait_s, self._loaded(workers) + reason)
        return None

    def _loaded(self, workers: Collection[str]) -> str:
        """The beginning of a reason."""
        if self.always:
            return ""
        why = f"pressure {self.overload.pressure(workers, self._now_s):.2f}"
        if self.overload.is_predicted(workers, self._now_s):
            why = "deadlines of clients within their share will be missed"
        return f"the cluster is overloaded ({why}), and "


def _remember(latest: OrderedDict[K, V], key: K, value: V) -> None:
    latest[key] = value
    latest.move_to_end(key)
    if len(latest) > MOST_REMEMBERED:
        latest.popitem(last=False)
