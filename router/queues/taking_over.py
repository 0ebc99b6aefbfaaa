"""Which group an idle worker takes over that waits elsewhere for a model that the worker would have to load.

    idle      nobody waits in its queue, nothing is in flight there, and so for as long as loading the other model
              takes; `LAST` times as long if no other worker has the model that it would give up
    gains     the group waits longer where it is than loading takes here, by as much again at least. Of one that has
              begun the newer half
    whose     of all such groups the most urgent one

A swap is thus never made by this rule unless a worker has been idle for as long as the swap takes, so such swaps take
half of a worker's time at most, whatever comes: who waits until it has loaded and asks for the other model again cannot
have it load without end.
"""

from collections.abc import Collection
from dataclasses import dataclass

from router.queues.group import Group
from router.queues.groups import Groups
from router.queues.outlook import Outlook
from router.queues.standing import Standing
from router.queues.worker import Worker

LAST = 4.0


@dataclass(slots=True)
class _Idle:
    """A worker that was idle, and how many requests it had got by then."""

    since_s: float
    sends: int


class TakingOver:
    """To be asked again and again, while anybody waits."""

    def __init__(self, groups: Groups, standing: Standing, outlook: Outlook) -> None:
        self._groups, self._standing, self._outlook = groups, standing, outlook
        self._idle: dict[str, _Idle] = {}

    def look(self, now_s: float) -> int:
        """Idle workers take groups over; how many did. O(groups) for each idle worker."""
        workers = list(self._standing.workers.values())
        idle = {worker.name: self._since(worker, now_s) for worker in workers if self._is_idle(worker)}
        self._idle = idle
        count = 0
        for worker in workers:
            mark = idle.get(worker.name)
            group = None if mark is None else self._best(worker, now_s - mark.since_s, workers, now_s)
            if group is not None:
                self._move(group, worker)
                count += 1
        return count

    def _is_idle(self, worker: Worker) -> bool:
        able = worker.is_open and worker.loaded is not None and len(worker.swap_s) > 1
        return able and not worker.in_flight and not any(worker.heads)

    def _since(self, worker: Worker, now_s: float) -> _Idle:
        known = self._idle.get(worker.name)
        if known is not None and known.sends == worker.sends:
            return known
        return _Idle(now_s, worker.sends)

    def _best(self, worker: Worker, idle_s: float, workers: Collection[Worker], now_s: float) -> Group | None:
        is_last = not any(one.is_open and one.loaded == worker.loaded for one in workers if one is not worker)
        patience = LAST if is_last else 1.0
        found: list[Group] = []
        for owner in workers:
            if owner is worker:
                continue
            for slot in self._outlook.slots(owner, self._standing.waiting(owner), now_s):
                group = self._groups.by_number()[slot.demand.number]
                swap_s = worker.swap_s.get(group.kind.model)
                if swap_s is None or group.kind.model == worker.loaded or worker.name in group.kind.exclude:
                    continue
                starts_s = slot.start_s
                if group.begun_on is not None:
                    starts_s += slot.demand.drain_s[owner.name] / 2 if len(group) > 1 else 0.0
                if idle_s >= patience * swap_s and starts_s >= 2 * swap_s:
                    found.append(group)
        return min(found, key=lambda group: group.urgency, default=None)

    def _move(self, group: Group, worker: Worker) -> None:
        owner = self._standing.where(group.number)
        assert owner is not None
        if group.begun_on is None:
            self._standing.take_out(owner, group.number)
        else:
            group = self._groups.cut(group)
            self._groups.drain_born()
        self._standing.put(worker, group.number)
