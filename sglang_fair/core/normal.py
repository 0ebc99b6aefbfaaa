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

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from statistics import median
from typing import Any

PAIR_CLIENTS = 64
ALL_CLIENTS = 1024
MOST_PAIRS = 10_000
ENOUGH = 8
DECAY = 0.05
"""Part that the newest call has in its client's mean, once there are 20."""
FIRST_EXTEND_TOKENS, FIRST_OUTPUT_TOKENS = 1000.0, 100.0
LEARN_EVERY = 64
"""Calls after which the usual is computed anew."""

Price = Callable[[float, float], float]
"""Cost of so many extend and output tokens; not negative, and monotonic."""


@dataclass(slots=True)
class Usual:
    """Decayed means of one client's calls, in tokens."""

    calls: int = 0
    extend: float = 0.0
    output: float = 0.0

    def learn(self, extend: float, output: float) -> None:
        self.calls += 1
        part = max(DECAY, 1 / self.calls)
        self.extend += part * (extend - self.extend)
        self.output += part * (output - self.output)


@dataclass(slots=True)
class _Group:
    """Such calls, of the clients that ended one last."""

    most: int
    calls: int = 0
    clients: OrderedDict[str, Usual] = field(default_factory=OrderedDict)

    def learn(self, client: str, extend: float, output: float) -> None:
        self.calls += 1
        if client not in self.clients:
            self.clients[client] = Usual()
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
