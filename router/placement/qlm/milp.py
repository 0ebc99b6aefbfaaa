"""The same problem as a mixed-integer program (QLM, Equations 6-13, corrected), for HiGHS.

For up to `MOST_GROUPS` groups, and as an oracle: four groups on two queues take 0.1 s, six a second, eight ten. It is
solved for lateness, then for the sum of starts with that kept. For queue g, group i and place j, with W drain, C - W
tail, S swap:

    x[g,i,j]   i stands there. Each group once; a place is filled only if the one before is; at most one in a place
    y[g,j,m]   m is the model at j. One in each place; that of the group which stands there, if one does
    t[g,j]     a swap in front of j:  t >= y[g,j,m] - y[g,j-1,m];  y[g,-1] is what is loaded
    d[g,j]     the tail and the swap that j waits for:  d >= Σ tail·x[g,·,j-1] + S[g,m] - M(1 - t) - M(1 - y[g,j,m])
    s[g,j]     its start: Σ_{k<j} W·x + Σ_{k<=j} d
    p[i]       late:  p >= s - slack[g,i] - M(1 - x[g,i,j])

The swap stands in d because how long it takes depends on the model; slack[g,i] is the smaller of both slacks of
`problem`.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from router.placement.qlm.problem import Problem, can_serve

if TYPE_CHECKING:
    from scipy.optimize import LinearConstraint

MOST_GROUPS = 6
NODES = 1_000
"""Of the search tree, at most, in about five seconds; not seconds, so that the result does not depend on the machine.
"""

KEPT_S = 2e-3
"""What is late by at most so much more counts as kept: HiGHS takes a millionth for 0, and M times that is seconds."""


class _Rows:
    """Constraints: sums of coefficient · variable, at least a number."""

    def __init__(self) -> None:
        self._at: list[int] = []
        self._variables: list[int] = []
        self._coefficients: list[float] = []
        self._least: list[float] = []
        self._most: list[float] = []

    def add(self, terms: Sequence[tuple[float, Any]], least: float, most: float = np.inf) -> None:
        for coefficient, variable in terms:
            self._at.append(len(self._least))
            self._variables.append(variable)
            self._coefficients.append(coefficient)
        self._least.append(least)
        self._most.append(most)

    def constraint(self, variables: int) -> "LinearConstraint":
        from scipy.optimize import LinearConstraint
        from scipy.sparse import coo_array

        shape = len(self._least), variables
        matrix = coo_array((self._coefficients, (self._at, self._variables)), shape=shape)
        return LinearConstraint(matrix.tocsr(), self._least, self._most)


class _Program:
    """Variables and constraints of one problem; the letters are those of the module's text."""

    def __init__(self, problem: Problem) -> None:
        demands, queues = problem.demands, problem.queues
        self.demands, self.queues = demands, queues
        self.n, self.q = len(demands), len(queues)
        self.models = sorted({one.model for one in demands} | {one.loaded or "" for one in queues})
        self.swap = np.array([[one.swap_s.get(model, 0.0) for model in self.models] for one in queues])
        self.drain = np.array([[d.drain_s.get(one.worker, 0.0) for d in demands] for one in queues])
        self.tail = np.array([[d.tail_s.get(one.worker, 0.0) for d in demands] for one in queues])
        last = np.array([[d.last_slack_s for d in demands]]) - self.drain
        self.slack = np.minimum(np.array([[d.slack_s for d in demands]]), last)
        waits = max(one.ahead_s + one.tail_s for one in queues)
        self.big = float(self.drain.sum() + self.tail.sum() + waits + (self.n + 1) * self.swap.max())
        """No start is later."""
        self.big_late = self.big + float(np.abs(self.slack).max())
        self.count = 0
        self.x = self._block(self.q, self.n, self.n)
        self.y = self._block(self.q, self.n, len(self.models))
        self.t = self._block(self.q, self.n)
        self.binary = self.count
        """Variables before this number are 0 or 1."""
        self.d, self.p, self.w = self._block(self.q, self.n), self._block(self.n), self._block(self.n)
        self.rows = _Rows()
        self._place_groups()
        for g in range(self.q):
            for j in range(self.n):
                self._choose_models(g, j)
                self._wait_for_swaps(g, j)
                self._be_late(g, j)

    def _block(self, *shape: int) -> NDArray[np.int64]:
        size = int(np.prod(shape))
        self.count += size
        return np.arange(self.count - size, self.count).reshape(shape)

    def _place_groups(self) -> None:
        """Each once; a place is filled only if the one before is, and by one at most."""
        for i in range(self.n):
            self.rows.add([(1, v) for v in self.x[:, i, :].ravel()], 1, 1)
        for g in range(self.q):
            for j in range(self.n):
                here = [(-1.0, v) for v in self.x[g, :, j]]
                self.rows.add(here, -1)
                if j:
                    self.rows.add([(1.0, v) for v in self.x[g, :, j - 1]] + here, 0)

    def _choose_models(self, g: int, j: int) -> None:
        """One model in each place, that of the group there; a swap if it is another one than before."""
        self.rows.add([(1, v) for v in self.y[g, j]], 1, 1)
        for m, model in enumerate(self.models):
            for i, demand in enumerate(self.demands):
                if demand.model == model:
                    self.rows.add([(1, self.y[g, j, m]), (-1, self.x[g, i, j])], 0)
            before = [(1.0, self.y[g, j - 1, m])] if j else []
            loaded = 0.0 if j else float((self.queues[g].loaded or "") == model)
            self.rows.add([(1.0, self.t[g, j]), (-1.0, self.y[g, j, m]), *before], -loaded)

    def _wait_for_swaps(self, g: int, j: int) -> None:
        tails = [(-float(self.tail[g, i]), self.x[g, i, j - 1]) for i in range(self.n)] if j else []
        first_tail = 0.0 if j else self.queues[g].tail_s
        for m in range(len(self.models)):
            terms = [(1.0, self.d[g, j]), (-self.big, self.t[g, j]), (-self.big, self.y[g, j, m]), *tails]
            self.rows.add(terms, float(self.swap[g, m]) + first_tail - 2 * self.big)

    def _be_late(self, g: int, j: int) -> None:
        """Lateness and start of the group that stands there."""
        start = [(-float(self.drain[g, i]), self.x[g, i, k]) for k in range(j) for i in range(self.n)]
        start += [(-1.0, self.d[g, k]) for k in range(j + 1)]
        ahead_s = self.queues[g].ahead_s
        for i in range(self.n):
            late_by = ahead_s - float(self.slack[g, i]) - self.big_late
            self.rows.add([(1.0, self.p[i]), (-self.big_late, self.x[g, i, j]), *start], late_by)
            self.rows.add([(1.0, self.w[i]), (-self.big, self.x[g, i, j]), *start], ahead_s - self.big)

    def minimise(self, goal: Sequence[int], nodes: int) -> NDArray[np.float64] | None:
        """The variables where the sum of `goal` is least, which is kept from now on; None if the nodes do not do."""
        from scipy.optimize import Bounds, milp

        cost, integer = np.zeros(self.count), np.zeros(self.count)
        upper = np.full(self.count, np.inf)
        cost[list(goal)] = 1
        integer[: self.binary] = upper[: self.binary] = 1
        for g, queue in enumerate(self.queues):
            for i, demand in enumerate(self.demands):
                if not can_serve(queue, demand):
                    upper[self.x[g, i]] = 0
        result = milp(
            cost,
            integrality=integer,
            bounds=Bounds(np.zeros(self.count), upper),
            constraints=self.rows.constraint(self.count),
            options={"node_limit": nodes, "mip_rel_gap": 0.0},
        )
        if result.status != 0:
            return None
        self.rows.add([(-1.0, v) for v in goal], -float(result.fun) - KEPT_S)
        found: NDArray[np.float64] = result.x
        return found

    def orders(self, found: NDArray[np.float64]) -> dict[str, list[int]]:
        """The numbers of the groups in each queue."""
        chosen = found[self.x] > 0.5
        return {
            queue.worker: [
                self.demands[i].number for j in range(self.n) for i in np.flatnonzero(chosen[g, :, j])
            ]
            for g, queue in enumerate(self.queues)
        }


def solve(problem: Problem, *, starts: bool = False) -> dict[str, list[int]] | None:
    """Orders that are late as little as possible; with `starts`, of these the ones that start earliest. None if the
    nodes did not suffice. O(groups² · queues) variables: for few groups."""
    if not problem.demands:
        return {queue.worker: [] for queue in problem.queues}
    program = _Program(problem)
    found = program.minimise(list(program.p), NODES)
    if found is not None and starts:
        found = program.minimise(list(program.w), NODES)
    return None if found is None else program.orders(found)
