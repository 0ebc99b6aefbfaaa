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

from router.placement.deadline.line import Due, Line, requests_of
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


def in_time(dues: Sequence[Sequence[Due]], capacities: Sequence[Capacity]) -> float:
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
            if left >= tokens and left_prompt >= prompt_tokens:
                found += worth * count
                used += tokens
                used_prompt += prompt_tokens
                continue
            part = min(left / tokens, left_prompt / prompt_tokens if prompt_tokens else 1.0, 1.0)
            found += worth * part * count
            used += part * tokens
            used_prompt += part * prompt_tokens
    return found


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

    def look(self, now_s: float, *, measures: bool = False) -> list[Swap]:
        """The swaps that are to begin, each replica at most once. They are in the replicas' `target` then. `measures`:
        the replicas that are missing are counted, too."""
        for one in self.replicas.values():
            if one.loaded is not None and not one.is_urgent:
                one.target = None  # what has not begun is judged anew
        look = _Look(self, now_s)
        found: list[Swap] = []
        while (swap := look.best()) is not None:
            look.order(swap)
            found.append(swap)
        self.short = {model: self.short.get(model, 0) + 1 if look.lacks(model) else 0 for model in look.dues}
        if measures:
            if not self.missing:
                self.missing_since_s = now_s
            self.missing = {model: more for model in look.dues if (more := look.missing(model))}
        return found


class _Look:
    def __init__(self, models: Models, now_s: float) -> None:
        self._finish_s, self._now_s = models.finish_s, now_s
        self._lines, self._replicas = models.lines, models.replicas
        self.dues = {model: line.dues(now_s) for model, line in self._lines.items() if line.items}
        self._most = {
            model: requests_of(first) + AHEAD_WORTH * requests_of(second)
            for model, (first, second) in self.dues.items()
        }
        self._rates: dict[str, tuple[float, float]] = {}
        """Of replicas of which they are not known."""
        self._at: dict[str, list[Replica]] = {}
        """By model, the replicas that have it or are to load it."""
        for one in self._replicas.values():
            if one.takes and (model := one.target or one.loaded) is not None:
                self._at.setdefault(model, []).append(one)
        self._capacities: dict[str, list[Capacity]] = {}
        self._base: dict[str, float] = {}
        """By model, what is in time as it is."""
        self._with: dict[tuple[str, float, str], float] = {}
        """What of a model is in time with one replica more that is away for so long, and is that one if known."""
        self._without: dict[str, tuple[Replica, float] | None] = {}
        """By model, the replica that is given away first, and what is lost by that."""
        for model in {*self.dues, *self._at}:
            self._count(model)

    def _count(self, model: str) -> None:
        self._capacities[model] = self._of(model, self._at.get(model, ()))
        if model in self.dues:
            self._base[model] = in_time(self.dues[model], self._capacities[model])

    def _of(self, model: str, replicas: Iterable[Replica]) -> list[Capacity]:
        found: dict[float, Capacity] = {}
        for one in replicas:
            rate, prefill = self._rate(model, one)
            if one.target is None:
                ready_s, free = self._now_s, max(0.0, one.kv_tokens - one.held)
            else:
                ready_s, free = max(self._now_s, one.ready_s), self._kv(model, one)
            known = found.get(ready_s)
            if known is not None:
                free, rate, prefill = known[1] + free, known[2] + rate, known[3] + prefill
            found[ready_s] = ready_s, free, rate, prefill
        return list(found.values())

    def _kv(self, model: str, one: Replica) -> float:
        return self._line(model).kv_tokens or one.kv_tokens

    def _line(self, model: str) -> Line:
        return self._lines[model]

    def _rate(self, model: str, one: Replica) -> tuple[float, float]:
        """Tokens and prompt tokens a second: this replica's, else those of others in the mean, else guessed."""
        rate, prefill = one.rates.get(model), one.prefills.get(model)
        if rate is not None and prefill is not None:
            return rate, prefill
        if model not in self._rates:
            others = self._replicas.values()
            rates = [other.rates[model] for other in others if model in other.rates]
            fills = [other.prefills[model] for other in others if model in other.prefills]
            self._rates[model] = (
                sum(rates) / len(rates)
                if rates
                else self._kv(model, one) / (self._line(model).mean_s or UNKNOWN_S),
                sum(fills) / len(fills) if fills else inf,
            )
        guessed = self._rates[model]
        return guessed[0] if rate is None else rate, guessed[1] if prefill is None else prefill

    def _gain(self, model: str, one: Replica, away_s: float) -> float:
        """More in time for `model` if this replica comes to it after `away_s`."""
        base = self._base[model]
        if base > self._most[model] - 1e-6:
            return 0.0
        key = model, away_s, one.name if model in one.rates else ""
        found = self._with.get(key)
        if found is None:
            more = self._now_s + away_s, self._kv(model, one), *self._rate(model, one)
            found = self._with[key] = in_time(self.dues[model], [*self._capacities[model], more])
        return found - base

    # -- shortage

    def lacks(self, model: str) -> bool:
        """Some of tier 0 cannot be in time."""
        count = requests_of(self.dues[model][0])
        return self._line(model).hopeless[0] > 0.5 or count - self._base[model] > 0.5

    def missing(self, model: str) -> int:
        """The fewest replicas more with which all of tier 0 are in time, those that are late as if they came now."""
        if not self.lacks(model):
            return 0
        line = self._line(model)
        count, tokens, prompts = line.hopeless
        dues = self.dues[model][0]
        if count:
            due_s = self._now_s + min(line.shortest_s(self._now_s), 3_600.0)
            dues = sorted([*dues, (due_s, count, tokens, prompts)])
        one = next(iter(self._at.get(model) or self._replicas.values()), None)
        if one is None:
            return 0
        rate, prefill = self._rate(model, one)
        more, count = 1, requests_of(dues)
        while more < MOST_MORE:
            added = self._now_s, more * self._kv(model, one), more * rate, more * prefill
            if count - in_time((dues, ()), [*self._capacities[model], added]) < 0.5:
                break
            more += 1 if more < 8 else 8
        return more

    # -- swaps

    def order(self, swap: Swap) -> None:
        """It begins."""
        one = self._replicas[swap.replica]
        had = one.loaded or ""
        one.target, one.is_urgent, one.ready_s = swap.model, swap.rank == 2, self._now_s + swap.away_s
        self._at[had].remove(one)
        if not self._at[had]:
            del self._at[had]
        self._at.setdefault(swap.model, []).append(one)
        for model in (had, swap.model):
            self._count(model)
            self._without.pop(model, None)
        self._with = {key: found for key, found in self._with.items() if key[0] not in (had, swap.model)}

    def best(self) -> Swap | None:
        """The one that is to begin now. Of those that are worth most if nothing else speaks against them, the first
        that is urgent and worth more than any other can be."""
        tried: list[tuple[float, str, str]] = []
        for has in self._at:
            giver, loss = self._giver(has)
            if giver is None:
                continue
            waits = has in self.dues
            for model in self.dues:
                if model == has or model not in giver.swap_s:
                    continue
                hope = self._gain(model, giver, giver.swap_s[model]) - loss
                if hope > 0 or not waits or model not in self._at:
                    tried.append((hope / giver.swap_s[model], has, model))
        best: Swap | None = None
        for hope, has, model in sorted(tried, reverse=True):
            if best is not None and best.rank == 2 and best.worth >= hope:
                break
            giver, loss = self._giver(has)
            swap = None if giver is None else self._judge(giver, has, model, loss)
            if swap is not None and (best is None or swap > best):
                best = swap
        return best

    def _giver(self, has: str) -> tuple[Replica | None, float]:
        """The replica that gives up this model soonest, and what is in time less by that."""
        if has not in self._without:
            some = self._at[has]
            givers = [one for one in some if one.target is None and len(one.swap_s) > 1]
            if not givers:
                self._without[has] = None
            else:
                giver = min(givers, key=lambda one: (self._tail_s(one), one.held, one.name))
                loss = 0.0
                if has in self.dues:
                    others = self._of(has, [one for one in some if one is not giver])
                    loss = self._base[has] - in_time(self.dues[has], others)
                self._without[has] = giver, loss
        return self._without[has] or (None, 0.0)

    def _judge(self, one: Replica, has: str, model: str, loss: float) -> Swap | None:
        line, swap_s, now_s = self._lines[model], one.swap_s[model], self._now_s
        tail_s, is_elsewhere = self._tail_s(one), len(self._at[has]) > 1
        away_s, away_all_s = swap_s + min(tail_s, self._finish_s), swap_s + tail_s
        waits, had_s = has in self.dues, now_s - one.since_s
        rate = sum(each[2] for each in self._capacities[model])
        here, back_s = self._rate(model, one)[0], one.swap_s.get(has, swap_s)
        gain, cost = self._gain(model, one, away_s), inf
        if gain > loss or not waits:
            cost = loss + self._future(
                has, away_s + line.tokens / (rate + here) + line.slowest_s + back_s, one
            )
        may_go = had_s >= max(swap_s if waits else 0.0, self._stay_s(one, has, is_elsewhere))
        if gain > cost and may_go and self._gain(model, one, away_s + swap_s + LOOK_S) < gain - 1e-9:
            return Swap(2, (gain - cost) / away_s, one.name, model, away_s)
        if not waits and (line.tokens / rate if rate else inf) > 2 * away_all_s:
            gain = gain and self._gain(model, one, away_all_s)
            work_s = line.tokens / here
            is_free = is_elsewhere or self._line(has).shortest_s(now_s) > PROTECTS * (away_all_s + back_s)
            empty_s = -1.0 if one.empty_s is None else now_s - one.empty_s
            is_worth_it = empty_s >= (0.0 if is_free else EMPTY * swap_s) or (
                is_free and work_s > away_all_s / 2
            )
            if gain >= cost and is_worth_it:
                return Swap(1, work_s / away_all_s, one.name, model, away_all_s)
        if model not in self._at and had_s >= STARVES * away_all_s:
            unfed_s = now_s - line.fed_s
            if unfed_s >= STARVES * max(STARVES_S, line.shortest_s(now_s)):
                return Swap(0, unfed_s, one.name, model, away_all_s)
        return None

    def _tail_s(self, one: Replica) -> float:
        """Until what runs there has ended."""
        if not one.flights:
            return 0.0
        return max(0.0, self._line(one.loaded or "").slowest_s - (self._now_s - one.sent_s))

    def _future(self, model: str, gone_s: float, one: Replica) -> float:
        """What comes meanwhile for `model`, is due before the replica is back, and cannot be done by its others."""
        found = tokens = 0.0
        for slo_s, asked in self._line(model).asked.items():
            per_s, tokens_per_s = asked.per_s(self._now_s)
            found += per_s * max(0.0, gone_s - slo_s)
            tokens += tokens_per_s
        others = sum(each[2] for each in self._capacities[model]) - self._rate(model, one)[0]
        return found * max(0.0, 1 - max(0.0, others) / tokens) if found else 0.0

    def _stay_s(self, one: Replica, has: str, is_elsewhere: bool) -> float:
        line = self._line(has)
        if not one.flights or is_elsewhere:
            return 0.0
        promised_s = min(flight.slo_s for flight in one.flights.values())
        return min(line.slowest_s, line.absence_s * line.mean_s / promised_s)
