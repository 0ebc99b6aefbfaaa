"""Orders for all queues by local search. Deterministic, and bounded by the groups that it looks at, not by time.

    starts     EDF, as it is and without patience, and by the time by which a group has to be done; the best goes on
    insert     a group is taken out and put where it does best, over all places of all queues
    restarts   when that does not help: some groups of the best orders found are taken out at random and put back one
               by one where they do best

The result is never worse than any start. As long as groups are late, they and those in front of them are tried; when
none is, all are, so as to start earlier, and there are no restarts.
"""

from collections.abc import Iterable, Mapping
from math import inf
from random import Random
from typing import NamedTuple

from router.placement.qlm.problem import (
    MOST_WORK,
    Demand,
    Problem,
    Queue,
    Worth,
    assign,
    can_serve,
    edf,
)

MOST_REMOVED = 12
"""Groups that a restart takes out."""
MOST_RESTARTS = 60
"""In a row without a better result."""
NO_WORTH = Worth(0.0, 0.0, 0.0)


class Found(NamedTuple):
    """The best orders, what they and the best start are worth, and how many groups were looked at."""

    orders: dict[str, list[int]]
    worth: Worth
    start: Worth
    work: int


class _Search:
    def __init__(self, problem: Problem, most_work: int, seed: int) -> None:
        self.problem, self.most_work, self.work = problem, most_work, 0
        self.random = Random(seed)
        self.queues = {queue.worker: queue for queue in problem.queues}
        self.demands = {demand.number: demand for demand in problem.demands}
        self.able = {
            demand.number: [queue.worker for queue in problem.queues if can_serve(queue, demand)]
            for demand in problem.demands
        }
        self.orders: dict[str, list[Demand]] = {}
        self.worths: dict[str, Worth] = {}

    def run(self) -> Found:
        found = [edf(self.problem), edf(self.problem, patient=False), assign(self.problem, _by_end)]
        best, start = found[0], Worth(inf, inf, inf)
        for orders in found:
            self._set(orders)
            if self._worth() < start:
                best, start = orders, self._worth()
        self._set(best)
        self._descend()
        best, worth, failed = self._numbers(), self._worth(), 0
        while (worth.late_s or worth.later_s) and failed < MOST_RESTARTS and self.work < self.most_work:
            self._shake()
            self._descend()
            if self._worth() < worth:
                best, worth, failed = self._numbers(), self._worth(), 0
            else:
                self._set(best)
                failed += 1
        return Found(best, worth, start, self.work)

    def _set(self, orders: Mapping[str, list[int]]) -> None:
        self.orders = {name: [self.demands[number] for number in orders[name]] for name in self.queues}
        self.worths = {name: self._of(name) for name in self.queues}

    def _numbers(self) -> dict[str, list[int]]:
        return {name: [demand.number for demand in order] for name, order in self.orders.items()}

    def _worth(self) -> Worth:
        return _sum(*self.worths.values()).rounded()

    def _of(self, name: str) -> Worth:
        self.work += len(self.orders[name])
        return _of(self.queues[name], self.orders[name])

    def _descend(self) -> None:
        """Insert until nothing helps, or the work is over."""
        improved = True
        while improved:
            improved = False
            for demand in self._tried():
                if self.work >= self.most_work:
                    return
                improved |= self._insert(demand)

    def _tried(self) -> list[Demand]:
        """Late groups and those in front of them, by queue; all if none is late."""
        tried = list[Demand]()
        for name, order in self.orders.items():
            for last in range(len(order), 0, -1):
                worth = _of(self.queues[name], order[:last])
                if not (worth.late_s or worth.later_s):
                    break
                if _of(self.queues[name], order[: last - 1])[:2] != worth[:2]:
                    tried += order[:last]
                    break
        return tried or [demand for order in self.orders.values() for demand in order]

    def _take_out(self, demand: Demand) -> tuple[str, int]:
        for name in self.able[demand.number]:
            if demand in self.orders[name]:
                place = self.orders[name].index(demand)
                del self.orders[name][place]
                self.worths[name] = self._of(name)
                return name, place
        raise KeyError(demand.number)

    def _put(self, demand: Demand, name: str, place: int) -> None:
        self.orders[name].insert(place, demand)
        self.worths[name] = self._of(name)

    def _insert(self, demand: Demand) -> bool:
        """Puts a group where it does best. Whether that is better than where it was."""
        before = self._worth()
        row, place = self._take_out(demand)
        name, at = self._best(demand)
        self._put(demand, name, at)
        if self._worth() < before:
            return True
        self._take_out(demand)
        self._put(demand, row, place)
        return False

    def _best(self, demand: Demand) -> tuple[str, int]:
        """The queue and the place where a group that is in none adds least, the first of equals."""
        best, least = ("", 0), Worth(inf, inf, inf)
        for name in self.able[demand.number]:
            queue, order, own = self.queues[name], self.orders[name], self.worths[name]
            first = 0
            if demand.is_bound:
                first = max((at + 1 for at, one in enumerate(order) if not one.tier), default=0)
            before = _empty(queue).then(order[:first])
            for place in range(first, len(order) + 1):
                added = before.then((demand,))
                self.work += 1
                if (added.late_s - before.late_s, added.later_s - before.later_s) <= least[:2]:
                    added = added.then(order[place:])
                    self.work += len(order) - place
                    worth = Worth(
                        added.late_s - own.late_s,
                        added.later_s - own.later_s,
                        added.waiting_s - own.waiting_s,
                    ).rounded()
                    if worth < least:
                        best, least = (name, place), worth
                if place < len(order):
                    if demand.tier == 0 and order[place].is_bound:
                        break
                    before = before.then((order[place],))
        return best

    def _shake(self) -> None:
        """Takes some groups out and puts them back where they do best, in a random order."""
        tried, every = self._tried(), list(self.problem.demands)
        some = self.random.randint(2, max(2, min(len(every), MOST_REMOVED)))
        chosen = self.random.choices(tried, k=(some + 1) // 2) + self.random.choices(every, k=some // 2)
        removed = sorted({demand.number for demand in chosen})
        for number in removed:
            self._take_out(self.demands[number])
        self.random.shuffle(removed)
        for number in removed:
            self._put(self.demands[number], *self._best(self.demands[number]))


class _Front(NamedTuple):
    """The first groups of a queue: when they are done, and what they are worth (`problem.slots`)."""

    queue: Queue
    now_s: float
    tail_s: float
    model: str | None
    late_s: float = 0.0
    later_s: float = 0.0
    waiting_s: float = 0.0

    def then(self, demands: Iterable[Demand]) -> "_Front":
        """These behind them."""
        queue, now_s, tail_s, model, late_s, later_s, waiting_s = self
        worker, swap_s = queue.worker, queue.swap_s
        for demand in demands:
            own = demand.model
            if own != model:
                now_s += tail_s + swap_s[own]
                model = own
            waiting_s += now_s
            late = now_s - demand.slack_s
            now_s += demand.drain_s[worker]
            if now_s - demand.last_slack_s > late:
                late = now_s - demand.last_slack_s
            if late > 0:
                if demand.tier:
                    later_s += late
                else:
                    late_s += late
            tail_s = demand.tail_s.get(worker, 0.0)
        return _Front(queue, now_s, tail_s, model, late_s, later_s, waiting_s)

    @property
    def worth(self) -> Worth:
        return Worth(self.late_s, self.later_s, self.waiting_s)


def search(problem: Problem, *, most_work: int = MOST_WORK, seed: int = 0) -> Found:
    """Orders for all queues, with each group once. The same for the same arguments."""
    return _Search(problem, most_work, seed).run()


def _of(queue: Queue, order: list[Demand]) -> Worth:
    return _empty(queue).then(order).worth


def _empty(queue: Queue) -> _Front:
    return _Front(queue, queue.ahead_s, queue.tail_s, queue.loaded)


def _sum(*worths: Worth) -> Worth:
    late_s, later_s, waiting_s = (sum(part) for part in zip(NO_WORTH, *worths, strict=True))
    return Worth(late_s, later_s, waiting_s)


def _by_end(demand: Demand) -> tuple[bool, float, int]:
    """By the time at which the group must be drained: right for one model at one worker (earliest due date)."""
    return demand.is_bound, demand.slack_s + min(demand.drain_s.values()), demand.number
