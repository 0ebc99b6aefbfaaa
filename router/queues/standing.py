"""Which group stands in whose queue. Every group is in one queue, or in `stranded`: nobody can serve it.

The order of a queue is its worker's `groups`. Only this module writes it, so a queue's `heads`, the groups that
somebody waits in, are always those of the queue.
"""

from collections.abc import Callable, Sequence

from router.queues.apply import applied, by_tier
from router.queues.group import Group
from router.queues.groups import Groups
from router.queues.problem import Orders
from router.queues.worker import Worker

Start = Callable[[Worker, Group], float]
"""When a group would start at a worker, behind all that may stand before it."""


class Standing:
    """The queues of all workers."""

    def __init__(self, groups: Groups, start_s: Start) -> None:
        self._groups, self._start_s = groups, start_s
        self.workers: dict[str, Worker] = {}
        """By name. Not to be written to."""
        self._where: dict[int, str] = {}
        self.stranded: list[int] = []
        self.ignored = 0
        """Entries of plans that named what was not there."""

    # -- what is here

    def where(self, number: int) -> Worker | None:
        """In whose queue a group is."""
        name = self._where.get(number)
        return None if name is None else self.workers[name]

    def waiting(self, worker: Worker) -> list[Group]:
        """The groups of a queue that somebody waits in, in its order."""
        found = map(self._groups.by_number().get, worker.groups)
        return [group for group in found if group is not None and group.deadlines]

    # -- groups

    def put(self, worker: Worker, number: int) -> None:
        """A group comes into a queue, at its place by tier."""
        worker.groups = by_tier([*worker.groups, number], self._groups.by_number())
        self._moved(number, worker)

    def put_behind(self, older: Group, number: int) -> bool:
        """A group comes right behind another one; False if that is in no queue."""
        worker = self.where(older.number)
        if worker is None:
            return False
        worker.groups.insert(worker.groups.index(older.number) + 1, number)
        self._moved(number, worker)
        return True

    def take_out(self, worker: Worker, number: int) -> None:
        """A group leaves a queue, to be put into another one."""
        worker.groups.remove(number)
        self._moved(number, None)

    def drop_if_over(self, group: Group) -> None:
        """A group that is over leaves its queue."""
        if self._groups.get(group.number) is not None:
            return
        name = self._where.pop(group.number, None)
        if name is not None:
            self.workers[name].groups.remove(group.number)
        elif group.number in self.stranded:
            self.stranded.remove(group.number)

    def settle(self, numbers: Sequence[int]) -> None:
        """Each group into the queue where it would start first."""
        for number in numbers:
            group = self._groups.get(number)
            if group is None:
                continue
            best = min(
                (
                    (self._start_s(worker, group), name)
                    for name, worker in self.workers.items()
                    if worker.can_serve(group)
                ),
                default=None,
            )
            if best is None:
                self._moved(number, None)
                self.stranded.append(number)
            else:
                self.put(self.workers[best[1]], number)

    def settle_stranded(self) -> None:
        """Somebody may be able to serve them."""
        stranded, self.stranded = self.stranded, []
        self.settle(stranded)

    def settle_born(self) -> None:
        """Groups that are new: the newer half of one goes right behind the older half, any other one by `settle`."""
        for group, after in self._groups.drain_born():
            if after is None or not self.put_behind(after, group.number):
                self.settle([group.number])

    # -- workers

    def add(self, worker: Worker) -> None:
        """It comes with the groups that it has."""
        self.workers[worker.name] = worker
        for number in worker.groups:
            self._moved(number, worker)

    def remove(self, name: str) -> Worker | None:
        """It is gone, with its queue; the worker, if it was here."""
        return self.workers.pop(name, None)

    def leave(self, worker: Worker) -> None:
        """All of its queue goes to the others."""
        groups, worker.groups = worker.groups, []
        for number in groups:
            self._moved(number, None)
        self.settle(groups)
        self.settle_born()

    # -- plans

    def apply(self, plan: Orders) -> None:
        """What is still there of a plan. The rest is counted in `ignored`."""
        orders = {name: worker.groups for name, worker in self.workers.items()}
        done = applied(plan, orders, self._groups.by_number(), self._can_serve)
        self.ignored += done.ignored
        for name, order in done.orders.items():
            worker = self.workers[name]
            worker.groups = order
            for number in order:
                self._moved(number, worker)
        placed = {number for order in done.orders.values() for number in order}
        self.stranded = [number for number in self.stranded if number not in placed]

    # -- inside

    def _can_serve(self, name: str, group: Group) -> bool:
        return self.workers[name].can_serve(group)

    def _moved(self, number: int, worker: Worker | None) -> None:
        if worker is None:
            self._where.pop(number, None)
        else:
            self._where[number] = worker.name
        group = self._groups.get(number)
        if group is not None:
            group.stand(None if worker is None else worker.heads)
