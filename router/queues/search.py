"""Orders for all queues by local search. Deterministic, and bounded by what it considers, not by time.

    starts     EDF by slack, EDF by the time by which a group has to be done, apparent tardiness cost with setups (Lee
               and Pinedo 1997) with a few values of its two parameters; the best of them goes on
    insert     a group is taken out and put where it does best, over all places of all queues
    swap       a group changes places with one of another queue
    restarts   when neither helps: some groups of the best orders found are taken out at random and put back one by one
               where they do best

The result is never worse than any start. As long as groups are late, they and those in front of them are tried; when
none is, all are, so as to start earlier, and there are no restarts.

`work` counts the terms of the sums that `weigh` adds up; a fixed part stands for the calls of numpy, so it is about
proportional to time, whatever the queues are like.
"""

from math import inf
from random import Random
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from router.queues.edf import assign, edf, urgency
from router.queues.problem import MOST_WORK, Demand, Problem, Worth
from router.queues.weigh import State, Weighed

LOOK_AHEADS = (0.5, 2.0, 6.0)
"""k1 of the apparent tardiness cost: over how many mean drain times urgency is felt."""
SETUP_WEIGHTS = (0.3, 2.0)
"""k2: how many mean setups a group has to be worth."""
MOST_REMOVED = 12
"""Groups that a restart takes out."""
MOST_RESTARTS = 60
"""In a row without a better result."""
CALL_WORK = 8_000
"""Of weighing one group: about as many terms as numpy adds up meanwhile."""


class Found(NamedTuple):
    """The best orders, what they and the best start are worth, and what it took to find them."""

    orders: dict[str, list[int]]
    worth: Worth
    start: Worth
    work: int


class _Search:
    def __init__(self, problem: Problem, most_work: int, seed: int) -> None:
        self.problem = problem
        self.state = State(problem)
        self.random = Random(seed)
        self.most_work = most_work
        self.work = 0

    def run(self) -> Found:
        state = self.state
        best, start = None, Worth(inf, inf, inf)
        for orders in _starts(state):
            state.set(orders)
            if state.worth() < start:
                best, start = orders, state.worth()
        assert best is not None
        state.set(best)
        self._descend()
        best, worth = self._copy(), state.worth()
        failed = 0
        while (worth.late_s or worth.later_s) and failed < MOST_RESTARTS and not self._is_over():
            self._shake()
            self._descend()
            if state.worth() < worth:
                best, worth, failed = self._copy(), state.worth(), 0
            else:
                state.set(best)
                failed += 1
        workers = [queue.worker for queue in self.problem.queues]
        numbers = [demand.number for demand in self.problem.demands]
        named = {worker: [numbers[at] for at in order] for worker, order in zip(workers, best, strict=True)}
        return Found(named, worth, start, self.work)

    def _descend(self) -> None:
        """Insert and swap until nothing helps, or the work is over."""
        improved = True
        while improved and not self._is_over():
            improved = False
            for move in (self._insert, self._swap):
                for at in self._tried():
                    improved |= move(at)
                    if self._is_over():
                        return
                if improved:
                    break

    def _tried(self) -> list[int]:
        """Late groups and those in front of them, by queue; all if none is late."""
        tried = []
        for row, order in enumerate(self.state.orders):
            late = np.flatnonzero(self.state.late[row, : len(order)] > 0)
            if len(late):
                tried += order[: int(late[-1]) + 1]
        return tried or [at for order in self.state.orders for at in order]

    def _insert(self, at: int) -> bool:
        """Put a group where it does best. Whether that is better than where it was."""
        state = self.state
        row, place = state.take_out(at)
        weighed = self._weigh(at)
        rows = state.rows_of[at]
        new_row, new_place = weighed.best()
        old = weighed.at(int(np.searchsorted(rows, row)), place)
        better = weighed.at(new_row, new_place) < old
        state.put(at, int(rows[new_row]) if better else row, new_place if better else place)
        return better

    def _swap(self, at: int) -> bool:
        """Let a group change places with the one with which that does best. Whether it is better."""
        state = self.state
        late, later, waiting = np.round(state.weigh_swaps(at), 6)
        self._spend(state.rows_of[at])
        keep = late == late.min()
        later = np.where(keep, later, inf)
        waiting = np.where(later == later.min(), waiting, inf)
        other = int(waiting.argmin())
        if not Worth(float(late[other]), float(later[other]), float(waiting[other])) < Worth(0.0, 0.0, 0.0):
            return False
        row, place = state.take_out(at)
        other_row, other_place = state.take_out(other)
        state.put(other, row, place)
        state.put(at, other_row, other_place)
        return True

    def _shake(self) -> None:
        """Take some groups out and put them back where they do best, in a random order."""
        count = len(self.problem.demands)
        tried = self._tried()
        some = self.random.randint(2, max(2, min(count, MOST_REMOVED)))
        removed = dict.fromkeys(self.random.choice(tried) for _ in range((some + 1) // 2))
        removed |= dict.fromkeys(self.random.randrange(count) for _ in range(some // 2))
        for at in removed:
            self.state.take_out(at)
        shuffled = sorted(removed)
        self.random.shuffle(shuffled)
        for at in shuffled:
            row, place = self._weigh(at).best()
            self.state.put(at, int(self.state.rows_of[at][row]), place)

    def _weigh(self, at: int) -> Weighed:
        self._spend(self.state.rows_of[at])
        return self.state.weigh(at)

    def _spend(self, rows: NDArray[np.int64]) -> None:
        width = int(self.state.length[rows].max()) + 1
        self.work += CALL_WORK + len(rows) * width * width

    def _is_over(self) -> bool:
        return self.work >= self.most_work

    def _copy(self) -> list[list[int]]:
        return [list(order) for order in self.state.orders]


def search(problem: Problem, *, most_work: int = MOST_WORK, seed: int = 0) -> Found:
    """Orders for all queues, with each group once. The same for the same arguments."""
    return _Search(problem, most_work, seed).run()


def _starts(state: State) -> list[list[list[int]]]:
    """Orders to begin with, groups by their place among the demands."""
    problem = state.problem
    place = {demand.number: at for at, demand in enumerate(problem.demands)}
    found = [edf(problem), edf(problem, patient=False), _numbered(assign(problem, _by_end))]
    starts = [
        [[place[number] for number in orders[queue.worker]] for queue in problem.queues] for orders in found
    ]
    return starts + [_by_tardiness(state, ahead, setup) for ahead in LOOK_AHEADS for setup in SETUP_WEIGHTS]


def _by_end(demand: Demand) -> tuple[bool, float, int]:
    """By the time at which the group must be drained: right for one model at one worker (earliest due date)."""
    return demand.is_bound, demand.slack_s + min(demand.drain_s.values()), demand.number


def _numbered(assigned: dict[str, list[Demand]]) -> dict[str, list[int]]:
    return {worker: [demand.number for demand in order] for worker, order in assigned.items()}


def _by_tardiness(state: State, ahead: float, setup: float) -> list[list[int]]:
    """Apparent tardiness cost with setups: whichever queue is free first takes the group that is worth most there."""
    demands = state.problem.demands
    orders: list[list[int]] = [[] for _ in state.problem.queues]
    now, tail, model = state.ahead.copy(), state.first_tail.copy(), state.loaded.copy()
    slack = np.array([d.slack_s for d in demands])

    def take(row: int, at: int) -> None:
        own = state.models[at]
        now[row] += (0.0 if own == model[row] else tail[row] + state.swap[row, own]) + state.drain[row, at]
        tail[row], model[row] = state.tail[row, at], own
        orders[row].append(at)

    by_urgency = sorted(range(len(demands)), key=lambda at: urgency(demands[at]))
    left = []
    for at in by_urgency:
        if demands[at].begun_on is None:
            left.append(at)
        else:
            take(int(state.rows_of[at][0]), at)
    mean_drain = max(float(state.drain[state.allowed].mean()), 1e-9) if demands else 1.0
    mean_setup = max(float(state.swap.mean()), 1e-9) if state.swap.size else 1.0
    for bound in (False, True):
        rest = np.array([at for at in left if state.bound[at] == bound], np.int64)
        while len(rest):
            useful = state.allowed[:, rest].any(axis=1)
            row = int(np.where(useful, now, inf).argmin())
            models = state.models[rest]
            switch = np.where(models == model[row], 0.0, tail[row] + state.swap[row, models])
            worth = -np.log(np.maximum(state.drain[row, rest], 1e-9))
            worth -= np.maximum(slack[rest] - now[row] - switch, 0.0) / (ahead * mean_drain)
            worth -= switch / (setup * mean_setup)
            chosen = int(np.where(state.allowed[row, rest], worth, -inf).argmax())
            take(row, int(rest[chosen]))
            rest = np.delete(rest, chosen)
    return orders
