"""The global scheduler (QLM, Equations 6-13): orders for all queues by local search, exactly for a few groups. Pure.

    starts     EDF, and by the time by which a group has to be done; the better one goes on
    insert     a group is taken out and put where it does best, over all places of all queues
    restarts   when that does not help: some groups of the best orders found are taken out at random and put back one
               by one where they do best
    exact      branch and bound from there: queue by queue each order of what is left, unless it is worth less already.
               Up to `FEW` groups; where it is asked for, of any number, as far as its work goes

Deterministic, and bounded by the groups that it looks at, not by time. The result is complete, so a queue never stands
still because a deadline cannot be met, and never worse than any start. As long as groups are late, they and those in
front of them are tried; when none is, all are, so as to start earlier, and there are no restarts.
"""

from collections.abc import Iterable, Mapping
from math import inf
from random import Random
from typing import Literal, NamedTuple

from router.placement.qlm.problem import (
    Demand,
    Orders,
    Problem,
    Queue,
    Worth,
    all_slots,
    assign,
    can_serve,
    edf,
)

MOST_WORK = 1_500_000
"""Groups that a search may look at."""
FEW = 6
"""Groups for which `auto` is exact, too."""
EXACT_WORK = 200_000
"""Beginnings of orders that are looked at, at most: a second or two."""
MOST_REMOVED = 12
"""Groups that a restart takes out."""
MOST_RESTARTS = 60
"""In a row without a better result."""

Solver = Literal["auto", "search", "exact"]
SOLVERS: tuple[Solver, ...] = ("auto", "search", "exact")


class Answer(NamedTuple):
    """Orders for all queues; how many groups are late all the same, and by how much."""

    orders: Orders
    late: int = 0
    late_s: float = 0.0


class Found(NamedTuple):
    """The best orders, what they and the best start are worth, and how many groups were looked at."""

    orders: dict[str, list[int]]
    worth: Worth
    start: Worth
    work: int


def plan(problem: Problem, *, solver: Solver = "auto", most_work: int = MOST_WORK, seed: int = 0) -> Answer:
    """The best orders found, the same for the same arguments: by search, and exactly too where few groups are late
    (auto) or always (exact). ValueError for an unknown solver."""
    if solver not in SOLVERS:
        raise ValueError(f"solver is one of {', '.join(SOLVERS)}, not {solver!r}")
    found = search(problem, most_work=most_work, seed=seed)
    if solver == "exact" or (solver == "auto" and found.worth.late_s and len(problem.demands) <= FEW):
        found = exact(problem, found)
    late = sum(slot.late_s > 0 for slot in all_slots(problem, found.orders))
    return Answer(found.orders, late, found.worth.late_s)


def exact(problem: Problem, found: Found) -> Found:
    """The best of all orders, if `EXACT_WORK` suffices; never worse than what was `found` before."""
    queues, orders, best, work = problem.queues, found.orders, found.worth, 0

    def descend(at: int, front: "_Front", left: list[Demand], before: Worth, placed: list[list[int]]) -> None:
        """`front` of queue `at` stands, with all of the queues before; `left` are to follow."""
        nonlocal orders, best, work
        work += 1
        so_far = Worth(before.late_s + front.late_s, before.waiting_s + front.waiting_s)
        if work > EXACT_WORK or so_far.rounded() >= best:
            return
        if not left:
            orders, best = {queue.worker: [] for queue in queues}, so_far.rounded()
            orders.update(zip(orders, placed, strict=False))
            return
        for number, demand in enumerate(left):
            if can_serve(queues[at], demand):
                others = left[:number] + left[number + 1 :]
                here = [*placed[:at], [*placed[at], demand.number]]
                descend(at, front.then((demand,)), others, before, here)
        if at + 1 < len(queues):
            descend(at + 1, _empty(queues[at + 1]), left, so_far, [*placed, []])

    if queues:
        descend(0, _empty(queues[0]), list(problem.demands), Worth(0.0, 0.0), [[]])
    return found._replace(orders=orders, worth=best)


def search(problem: Problem, *, most_work: int = MOST_WORK, seed: int = 0) -> Found:
    """Orders for all queues, with each group once. The same for the same arguments."""
    return _Search(problem, most_work, seed).run()


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
        by_end = assign(
            self.problem, lambda one: (one.slack_s + min(one.drain_s.values(), default=0.0), one.number)
        )  # right for one model at one worker (earliest due date)
        found: list[Orders] = [edf(self.problem)]
        found.append({worker: [one.number for one in order] for worker, order in by_end.items()})
        best, start = found[0], Worth(inf, inf)
        for orders in found:
            self._set(orders)
            if self._worth() < start:
                best, start = orders, self._worth()
        self._set(best)
        self._descend()
        best, found_worth, failed = self._numbers(), self._worth(), 0
        while found_worth.late_s and failed < MOST_RESTARTS and self.work < self.most_work:
            self._shake()
            self._descend()
            if self._worth() < found_worth:
                best, found_worth, failed = self._numbers(), self._worth(), 0
            else:
                self._set(best)
                failed += 1
        return Found({name: list(order) for name, order in best.items()}, found_worth, start, self.work)

    def _set(self, orders: Orders) -> None:
        self.orders = {name: [self.demands[number] for number in orders[name]] for name in self.queues}
        self.worths = {name: self._of(name) for name in self.queues}

    def _numbers(self) -> Mapping[str, list[int]]:
        return {name: [demand.number for demand in order] for name, order in self.orders.items()}

    def _worth(self) -> Worth:
        late_s, waiting_s = (sum(part) for part in zip((0.0, 0.0), *self.worths.values(), strict=True))
        return Worth(late_s, waiting_s).rounded()

    def _of(self, name: str) -> Worth:
        self.work += len(self.orders[name])
        return _empty(self.queues[name]).then(self.orders[name]).worth

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
            late_s, last, front = 0.0, 0, _empty(self.queues[name])
            for at, demand in enumerate(order):
                front = front.then((demand,))
                if front.late_s > late_s:
                    late_s, last = front.late_s, at + 1
            tried += order[:last]
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
        best, least = ("", 0), Worth(inf, inf)
        for name in self.able[demand.number]:
            order, own = self.orders[name], self.worths[name]
            before = _empty(self.queues[name])
            for place in range(len(order) + 1):
                added = before.then((demand,))
                self.work += 1
                if added.late_s - before.late_s <= least.late_s:
                    added = added.then(order[place:])
                    self.work += len(order) - place
                    more = Worth(added.late_s - own.late_s, added.waiting_s - own.waiting_s).rounded()
                    if more < least:
                        best, least = (name, place), more
                if place < len(order):
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
    waiting_s: float = 0.0

    def then(self, demands: Iterable[Demand]) -> "_Front":
        """These behind them."""
        queue, now_s, tail_s, model, late_s, waiting_s = self
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
                late_s += late
            tail_s = demand.tail_s.get(worker, 0.0)
        return _Front(queue, now_s, tail_s, model, late_s, waiting_s)

    @property
    def worth(self) -> Worth:
        return Worth(self.late_s, self.waiting_s)


def _empty(queue: Queue) -> _Front:
    return _Front(queue, queue.ahead_s, queue.tail_s, queue.loaded)
