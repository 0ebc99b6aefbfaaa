"""What a call of an application normally needs (FairServe, section 3.2, Equation 2), learnt from calls that ended.

    client      decayed mean of its extend and output tokens, for each (app, stage)
    pair        the mean over the clients of an (app, stage) that ended a call last, each counted once, however much it
                sends
    weight      what the mean costs, by a price: at least 1, and within `spread` times the usual either side

A pair is known from `ENOUGH` calls on. Before, its app counts; then all calls; then `FIRST_EXTEND_TOKENS` and
`FIRST_OUTPUT_TOKENS`.

Promise to those that share an app: of n clients of a pair (up to `PAIR_CLIENTS`), one moves its weight by 1/n of the
clamp at most, whatever it sends. For that each client's own mean is clamped before they are averaged, and the usual is
the median of all clients, not their mean, which one client could carry away: the median, and the clamp with it, is
never farther than the next client in the order of what their calls cost. Known leak: k invented names are k clients.

A call costs O(1) to learn and O(clients of the pair) to weigh; memory is O(pairs kept · `PAIR_CLIENTS`).
"""

import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import inf
from statistics import median
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

PAIR_CLIENTS = 64
ALL_CLIENTS = 1024
MOST_PAIRS = 10_000
ENOUGH = 8
DECAY = 0.05
"""Part that the newest call has in its client's mean, once there are 20."""
FIRST_EXTEND_TOKENS, FIRST_OUTPUT_TOKENS = 1000.0, 100.0
LEARN_EVERY = 64
"""Calls after which the usual is computed anew."""

VERSION = 2
"""Of what `Normal.to_json` gives."""

Price = Callable[[float, float], float]
"""Cost of so many extend and output tokens; not negative, and monotonic."""


class BadNormal(ValueError):
    """What was saved is no such record."""


Count = Annotated[int, Meta(ge=0)]
Number = Annotated[float, Meta(ge=0, le=sys.float_info.max)]


class Usual(msgspec.Struct, array_like=True):
    """Decayed means of one client's calls, in tokens."""

    client: str
    calls: Count = 0
    extend: Number = 0.0
    output: Number = 0.0

    def learn(self, extend: float, output: float) -> None:
        self.calls += 1
        part = max(DECAY, 1 / self.calls)
        self.extend += part * (extend - self.extend)
        self.output += part * (output - self.output)


class _Saved(msgspec.Struct):
    """The calls of a pair, of an app, or all."""

    calls: Count
    clients: list[Usual]


class _Record(msgspec.Struct):
    """What `Normal.to_json` gives. Version 1 had two more numbers for each client."""

    version: Literal[1, 2]
    pairs: Annotated[list[tuple[str, str, _Saved]], Meta(max_length=MOST_PAIRS)]
    apps: Annotated[list[tuple[str, _Saved]], Meta(max_length=MOST_PAIRS)]
    all: _Saved


@dataclass(slots=True)
class _Group:
    """Such calls, of the clients that ended one last."""

    most: int
    calls: int = 0
    clients: OrderedDict[str, Usual] = field(default_factory=OrderedDict)

    @classmethod
    def restored(cls, saved: _Saved, most: int) -> "_Group":
        """ValueError if that is more than `most` clients, or calls of none."""
        if len(saved.clients) > most or (saved.calls and not saved.clients):
            raise ValueError(f"{saved.calls} calls of {len(saved.clients)} clients")
        return cls(most, saved.calls, OrderedDict((one.client, one) for one in saved.clients))

    def saved(self) -> Any:
        return msgspec.to_builtins(_Saved(self.calls, list(self.clients.values())))

    def learn(self, client: str, extend: float, output: float) -> None:
        self.calls += 1
        if client not in self.clients:
            self.clients[client] = Usual(client)
        self.clients[client].learn(extend, output)
        self.clients.move_to_end(client)
        if len(self.clients) > self.most:
            self.clients.popitem(last=False)


class Normal:
    """Learns with `learn`, answers `weight`. ValueError for a `spread` below 1."""

    def __init__(self, price: Price, spread: float = 8.0) -> None:
        if not 1 <= spread < inf:
            raise ValueError(f"spread must be a number from 1 on, not {spread!r}")
        self._price = price
        self._spread = spread
        self._pairs: OrderedDict[tuple[str, str], _Group] = OrderedDict()
        self._apps: OrderedDict[str, _Group] = OrderedDict()
        self._all = _Group(ALL_CLIENTS)
        self._usual: float | None = None

    def learn(self, client: str, app: str, stage: str, extend_tokens: float, output_tokens: float) -> None:
        """A call of `client` has ended and was served so many tokens."""
        if not (0 <= extend_tokens < inf and 0 <= output_tokens < inf):
            raise ValueError(f"tokens must be numbers from 0 on, not {extend_tokens!r} and {output_tokens!r}")
        pair = _kept(self._pairs, (app, stage), PAIR_CLIENTS)
        of_app = _kept(self._apps, app, PAIR_CLIENTS)
        for group in (pair, of_app, self._all):
            group.learn(client, extend_tokens, output_tokens)
        if len(self._all.clients) < LEARN_EVERY or not self._all.calls % LEARN_EVERY:
            self._usual = None

    def weight(self, app: str, stage: str) -> float:
        """What a normal call of the pair costs (w of Equation 2): at least 1."""
        least, most = self.clamp()
        group = self._known(app, stage)
        if group is None:
            return max(1.0, self.usual())
        costs = [self._clamped(usual, least, most) for usual in group.clients.values()]
        return max(1.0, sum(costs) / len(costs))

    def usual(self) -> float:
        """The median of what all clients' calls cost in the mean."""
        if self._usual is None:
            of_all = [self._price(usual.extend, usual.output) for usual in self._all.clients.values()]
            enough = self._all.calls >= ENOUGH
            self._usual = median(of_all) if enough else self._price(FIRST_EXTEND_TOKENS, FIRST_OUTPUT_TOKENS)
        return self._usual

    def clamp(self) -> tuple[float, float]:
        """Least and largest weight of any pair, but for the least of all, 1."""
        usual = self.usual()
        return usual / self._spread, usual * self._spread

    def to_json(self) -> Mapping[str, Any]:
        """All that was learnt, JSON-ready."""
        return {
            "version": VERSION,
            "pairs": [[*pair, group.saved()] for pair, group in self._pairs.items()],
            "apps": [[app, group.saved()] for app, group in self._apps.items()],
            "all": self._all.saved(),
        }

    def restore(self, saved: object) -> None:
        """Goes on from what `to_json` gave. Raises `BadNormal`, and then nothing has changed."""
        try:
            content, made = msgspec.convert(saved, _Record), _Group.restored
            pairs = OrderedDict(((app, stage), made(one, PAIR_CLIENTS)) for app, stage, one in content.pairs)
            apps = OrderedDict((app, made(one, PAIR_CLIENTS)) for app, one in content.apps)
            everything = made(content.all, ALL_CLIENTS)
        except ValueError as error:
            raise BadNormal(f"not what was saved of normal calls: {error}") from None
        self._pairs, self._apps, self._all, self._usual = pairs, apps, everything, None

    @property
    def calls(self) -> int:
        """How many were learnt."""
        return self._all.calls

    def __len__(self) -> int:
        """Pairs that are kept."""
        return len(self._pairs)

    def _known(self, app: str, stage: str) -> _Group | None:
        for group in (self._pairs.get((app, stage)), self._apps.get(app), self._all):
            if group is not None and group.calls >= ENOUGH:
                return group
        return None

    def _clamped(self, usual: Usual, least: float, most: float) -> float:
        return min(most, max(least, self._price(usual.extend, usual.output)))


def _kept(groups: OrderedDict[Any, _Group], name: Any, most: int) -> _Group:
    """The group `name`, now the latest; the one that is unused for longest goes if there are too many."""
    group = groups.setdefault(name, _Group(most))
    groups.move_to_end(name)
    if len(groups) > MOST_PAIRS:
        groups.popitem(last=False)
    return group
