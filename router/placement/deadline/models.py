"""Which model a replica loads: another one when more requests come in time by that than are lost.

    in time    what waits for a model is walked by due time, tier 0 first (worth 1, tier 1 `AHEAD_WORTH`): as much as
               the replicas have free and can work off until then, in tokens and in prompt tokens
    away       the time to load; and until what runs has ended, where that is awaited
    gain       more in time for the model that waits, from when the replica has it
    loss       less in time for the model that it has, and what will come for that and will not be served in time
    urgent     the gain is larger, and would be smaller if another swap went first; and if something waits for what the
               replica has, it has had that for as long as loading takes and for its stay. What runs is taken back
    voluntary  nothing waits for what the replica has, nothing is lost, and it is worth it. What runs there ends first
    a turn     no replica has the model, none of it was sent for long, and the replica has had its own for four times as
               long as loading takes: so no model starves, and at most half of the time goes into loading
    stay       a stream that is taken back pauses until its model is back. Over its answer pauses are to last no longer
               than the time to its first token that was promised: an answer that takes `mean` seconds pauses
               `mean / stay` times, each for as long as the model was away last. So stay = absence · mean / promised

A look walks each model three times (as it is, with a replica more, with one less), and a few swaps that may be the best
once more: O(models · buckets + models²). Replicas that are ready count as one.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

from router.placement.deadline.line import LATE, Due, Dues, Line
from router.placement.deadline.replica import UNKNOWN_S, Replica

LOOK_S = 0.5
AHEAD_WORTH = 0.01
STARVES, STARVES_S, PROTECTS, EMPTY = 4.0, 60.0, 10.0, 4.0
MOST_MORE = 64
"""Replicas that may be said to be missing."""

Capacity = tuple[float, float, float, float]
"""Replicas that are ready at the same time: when, free tokens, and tokens and prompt tokens a second."""


class Swap(NamedTuple):
    """The best is the largest."""

    rank: int
    """2 urgent, 1 voluntary, 0 a turn."""
    worth: float
    replica: str
    model: str
    away_s: float


def in_time(dues: Dues, capacities: Sequence[Capacity]) -> float:
    """What of it can be served in time."""
    found = used = used_prompt = 0.0
    for worth, tier in zip((1.0, AHEAD_WORTH), dues, strict=True):
        for due_s, count, tokens, prompt_tokens in tier:
            left, left_prompt = -used, -used_prompt
            for ready_s, free, rate, prefill in capacities:
                if due_s > ready_s:
                    left += free + rate * (due_s - ready_s)
                    left_prompt += prefill * (due_s - ready_s)
            if left <= 0 or left_prompt <= 0:
                continue
            part = 1.0
            if left < tokens or left_prompt < prompt_tokens:
                part = min(left / tokens, left_prompt / prompt_tokens if prompt_tokens else 1.0, 1.0)
            found += worth * part * count
            used += part * tokens
            used_prompt += part * prompt_tokens
    return found


def requests_of(dues: Sequence[Due]) -> float:
    return sum([due[1] for due in dues])


@dataclass(slots=True, eq=False)
class _Model:
    """One at a look: what waits for it, and the replicas that have it or are to load it."""

    line: Line
    dues: Dues
    at: list[Replica] = field(default_factory=list)
    capacities: list[Capacity] = field(default_factory=list)
    rate: float = 0.0
    """Tokens a second, of all of them."""
    base: float = 0.0
    """In time as it is."""
    gains: dict[tuple[float, str], float] = field(default_factory=dict)
    """In time more with a replica that is away so long, by that replica if its own rate is known."""
    giver: Replica | None = None
    """The one that gives the model up soonest."""
    loss: float | None = None
    """What is in time less by that; None: not known yet."""
    guess: tuple[float, float] | None = None
    """The rates of replicas of which they are not known."""

    waits: bool = field(init=False)
    most: float = field(init=False)
    """In time with replicas without end."""

    def __post_init__(self) -> None:
        self.waits = self.line.count > 0
        self.most = requests_of(self.dues[0]) + AHEAD_WORTH * requests_of(self.dues[1])


@dataclass
class Models:
    """`finish_s`: for so long what runs may go on before an urgent swap."""

    lines: Mapping[str, Line]
    replicas: Mapping[str, Replica]
    finish_s: float
    missing: dict[str, int] = field(default_factory=dict)
    """By model, how many more replicas would do."""
    short: dict[str, int] = field(default_factory=dict)
    """By model, for how many looks in a row some of tier 0 could not be in time."""
    missing_since_s: float = 0.0
    _now_s: float = 0.0
    _models: dict[str, _Model] = field(default_factory=dict)

    def look(self, now_s: float, *, measures: bool = False) -> list[Swap]:
        """The swaps that are to begin, each replica at most once. They are in the replicas' `target` then. `measures`:
        the replicas that are missing are counted, too."""
        self._now_s, found = now_s, list[Swap]()
        self._models = {
            name: _Model(line, line.dues(now_s) if line.count else ([], []))
            for name, line in self.lines.items()
        }
        for one in self.replicas.values():
            if one.loaded is not None and not one.is_urgent:
                one.target = None  # what has not begun is judged anew
            if one.takes and (model := one.target or one.loaded) is not None:
                self._models[model].at.append(one)
        for name in self._models:
            self._count(name)
        while (swap := self._best()) is not None:
            self._order(swap)
            found.append(swap)
        wait = [name for name, model in self._models.items() if model.waits]
        self.short = {name: self.short.get(name, 0) + 1 if self._lacks(name) else 0 for name in wait}
        if measures:
            if not self.missing:
                self.missing_since_s = now_s
            self.missing = {name: more for name in wait if (more := self._missing(name))}
        return found

    # -- what can be done

    def _count(self, name: str) -> None:
        model = self._models[name]
        model.capacities, model.gains = self._of(name, model.at), {}
        model.rate = sum(each[2] for each in model.capacities)
        model.base = in_time(model.dues, model.capacities)
        givers = [one for one in model.at if one.target is None and len(one.swap_s) > 1]
        model.giver = min(givers, key=lambda one: (self._tail_s(one), one.held, one.name), default=None)
        model.loss = None

    def _of(self, name: str, replicas: Iterable[Replica]) -> list[Capacity]:
        found: dict[float, Capacity] = {}
        for one in replicas:
            rate, prefill = self._rate(name, one)
            if one.target is None:
                ready_s, free = self._now_s, max(0.0, one.kv_tokens - one.held)
            else:
                ready_s, free = max(self._now_s, one.ready_s), self._kv(name, one)
            known = found.get(ready_s)
            if known is not None:
                free, rate, prefill = known[1] + free, known[2] + rate, known[3] + prefill
            found[ready_s] = ready_s, free, rate, prefill
        return list(found.values())

    def _kv(self, name: str, one: Replica) -> float:
        return self.lines[name].kv_tokens or one.kv_tokens

    def _rate(self, name: str, one: Replica) -> tuple[float, float]:
        """Tokens and prompt tokens a second: this replica's, else those of others in the mean, else guessed."""
        rate, prefill = one.rates.get(name), one.prefills.get(name)
        if rate is not None and prefill is not None:
            return rate, prefill
        model = self._models[name]
        if model.guess is None:
            rates = [other.rates[name] for other in self.replicas.values() if name in other.rates]
            fills = [other.prefills[name] for other in self.replicas.values() if name in other.prefills]
            guessed = self._kv(name, one) / (model.line.mean_s or UNKNOWN_S)
            model.guess = (
                sum(rates) / len(rates) if rates else guessed,
                sum(fills) / len(fills) if fills else inf,
            )
        return model.guess[0] if rate is None else rate, model.guess[1] if prefill is None else prefill

    def _gain(self, name: str, one: Replica, away_s: float) -> float:
        """More in time for this model if the replica comes to it after `away_s`."""
        model = self._models[name]
        key = away_s, one.name if name in one.rates else ""
        gain = model.gains.get(key)
        if gain is None:
            gain = 0.0
            if model.base <= model.most - 1e-6:
                more = self._now_s + away_s, self._kv(name, one), *self._rate(name, one)
                gain = in_time(model.dues, [*model.capacities, more]) - model.base
            model.gains[key] = gain
        return gain

    def _loss(self, name: str) -> float:
        """Less in time for this model without its giver."""
        model = self._models[name]
        if model.loss is None:
            others = self._of(name, [one for one in model.at if one is not model.giver])
            model.loss = model.base - in_time(model.dues, others)
        return model.loss

    # -- shortage

    def _lacks(self, name: str) -> bool:
        """Some of tier 0 cannot be in time."""
        model = self._models[name]
        return LATE in model.line.buckets[0] or requests_of(model.dues[0]) - model.base > 0.5

    def _missing(self, name: str) -> int:
        """The fewest replicas more with which all of tier 0 are in time, those that are late as if they came now."""
        model = self._models[name]
        one = next(iter(model.at or self.replicas.values()), None)
        if one is None or not self._lacks(name):
            return 0
        dues = model.dues[0]
        if (late := model.line.buckets[0].get(LATE)) is not None:
            due_s = self._now_s + min(model.line.shortest_s(self._now_s), 3_600.0)
            dues = sorted([*dues, (due_s, late[0], late[1], late[2])])
        rate, prefill = self._rate(name, one)
        more, count = 1, requests_of(dues)
        while more < MOST_MORE:
            added = self._now_s, more * self._kv(name, one), more * rate, more * prefill
            if count - in_time((dues, []), [*model.capacities, added]) < 0.5:
                break
            more += 1 if more < 8 else 8
        return more

    # -- swaps

    def _order(self, swap: Swap) -> None:
        one = self.replicas[swap.replica]
        had = one.loaded or ""
        one.target, one.is_urgent, one.ready_s = swap.model, swap.rank == 2, self._now_s + swap.away_s
        self._models[had].at.remove(one)
        self._models[swap.model].at.append(one)
        for name in (had, swap.model):
            self._count(name)

    def _best(self) -> Swap | None:
        """The one that is to begin now. Of those that are worth most if nothing else speaks against them, the first
        that is urgent and worth more than any other can be."""
        tried: list[tuple[float, str, str]] = []
        for has, model in self._models.items():
            if (one := model.giver) is None:
                continue
            for name, other in self._models.items():
                if name == has or not other.waits or name not in one.swap_s:
                    continue
                hope = self._gain(name, one, one.swap_s[name]) - self._loss(has)
                if hope > 0 or not model.waits or not other.at:
                    tried.append((hope / one.swap_s[name], has, name))
        best: Swap | None = None
        for hope, has, name in sorted(tried, reverse=True):
            if best is not None and best.rank == 2 and best.worth >= hope:
                break
            swap = self._judge(has, name)
            if swap is not None and (best is None or swap > best):
                best = swap
        return best

    def _judge(self, has: str, name: str) -> Swap | None:
        old, new, now_s = self._models[has], self._models[name], self._now_s
        one, loss, waits = old.giver, self._loss(has), old.waits
        assert one is not None
        swap_s, tail_s, is_elsewhere = one.swap_s[name], self._tail_s(one), len(old.at) > 1
        away_s, away_all_s = swap_s + min(tail_s, self.finish_s), swap_s + tail_s
        here, back_s, had_s = self._rate(name, one)[0], one.swap_s.get(has, swap_s), now_s - one.since_s
        gain, cost = self._gain(name, one, away_s), inf
        if gain > loss or not waits:
            gone_s = away_s + new.line.tokens / (new.rate + here) + new.line.slowest_s + back_s
            cost = loss + self._future(has, gone_s, one)
        may_go = had_s >= max(swap_s if waits else 0.0, self._stay_s(one, old))
        if gain > cost and may_go and self._gain(name, one, away_s + swap_s + LOOK_S) < gain - 1e-9:
            return Swap(2, (gain - cost) / away_s, one.name, name, away_s)
        if not waits and (new.line.tokens / new.rate if new.rate else inf) > 2 * away_all_s:
            gain = gain and self._gain(name, one, away_all_s)
            work_s = new.line.tokens / here
            is_free = is_elsewhere or old.line.shortest_s(now_s) > PROTECTS * (away_all_s + back_s)
            empty_s = -1.0 if one.empty_s is None else now_s - one.empty_s
            is_worth_it = empty_s >= (0.0 if is_free else EMPTY * swap_s) or (
                is_free and work_s > away_all_s / 2
            )
            if gain >= cost and is_worth_it:
                return Swap(1, work_s / away_all_s, one.name, name, away_all_s)
        if not new.at and had_s >= STARVES * away_all_s:
            unfed_s = now_s - new.line.fed_s
            if unfed_s >= STARVES * max(STARVES_S, new.line.shortest_s(now_s)):
                return Swap(0, unfed_s, one.name, name, away_all_s)
        return None

    def _tail_s(self, one: Replica) -> float:
        """Until what runs there has ended."""
        if not one.flights:
            return 0.0
        return max(0.0, self.lines[one.loaded or ""].slowest_s - (self._now_s - one.sent_s))

    def _future(self, name: str, gone_s: float, one: Replica) -> float:
        """What comes meanwhile for a model, is due before the replica is back, and cannot be done by its others."""
        found = tokens = 0.0
        model = self._models[name]
        for slo_s, asked in model.line.asked.items():
            per_s, tokens_per_s = asked.per_s(self._now_s)
            found += per_s * max(0.0, gone_s - slo_s)
            tokens += tokens_per_s
        others = max(0.0, model.rate - self._rate(name, one)[0])
        return found * max(0.0, 1 - others / tokens) if found else 0.0

    def _stay_s(self, one: Replica, has: _Model) -> float:
        """The least time for which it keeps its model."""
        if not one.flights or len(has.at) > 1:
            return 0.0
        promised_s = min(flight.slo_s for flight in one.flights.values())
        return min(has.line.slowest_s, has.line.absence_s * has.line.mean_s / promised_s)
