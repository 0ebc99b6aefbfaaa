"""Virtual queues: in which order each worker gets the groups, what it pulls next, and which model it is to have.

    new groups  the newer half of a group goes behind the older one; any other one into the queue where it would start
                first
    pulling     a worker that has room gets a request of its first groups of the model that is loaded, up to the first
                of another model, which waits for the swap. Of these: what can be in time before what is late, then the
                earliest deadline. Every `OVERDUE_EVERY`th pull is of what is late longest, so none starves. (The paper
                counts seconds of lateness: one that is late by a minute is worth as much as sixty by a second)
    lending     it serves requests of other queues, of its model, that can be in time while its own are late, or have
                less than `DANGER` of their time left and are more urgent than its own. Without it, in a trial, up to 40
                points of attainment were lost to EDF by request: urgent requests waited in one queue while another
                worker served its own, which had time
    balancing   a worker whose queue is empty takes, from the longest other queue, a group of its model that has not
                begun if that queue keeps another one, else the newer half. One that has been idle for as long as
                loading takes (`LAST` times as long if no other has its model) takes over a group of another model that
                waits twice as long where it is: so such swaps take half of a worker's time at most
    swapping    to the model of the first group in the queue; not while all of the loaded model can be served first
                without a later group of another model (`problem.stays`), nor before a model that was just loaded has
                served some request
    eviction    a worker that `evicts` takes requests back for more urgent ones (`core.preemption`): what is in flight
                and due much later does not count against one in time

A worker that is gone leaves its groups to the others. What can be served nowhere waits in `stranded`.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import dropwhile, takewhile
from math import inf

from router.placement.contract import Equipment, May, Request
from router.placement.qlm.estimate import Ahead, Estimator, Pace, Wait
from router.placement.qlm.groups import Group, Groups
from router.placement.qlm.problem import FAR_S, Demand, Orders, Problem, Queue, Slot, slots, stays
from router.placement.window import Window

OVERDUE_EVERY = 8
DANGER = 0.75
LAST = 4.0
STAYS_S = 0.25
"""How long it holds that a queue's loaded model is served first."""
_MOST_MISSED = 32
"""Requests that are found to be late with one pull."""


@dataclass(slots=True, eq=False)
class Worker(Window):
    """A worker with its queue."""

    groups: list[int] = field(default_factory=list)
    """Its queue."""
    in_flight: dict[str, tuple[str, float, float]] = field(default_factory=dict)
    """By request, its client, its tokens and when it is due."""
    overrun_tokens: int = 0
    is_fresh: bool = False
    """It has just loaded its model and served none of it."""
    stays: tuple[bool, float] = False, -inf
    """Whether it serves its model first, and until when that holds."""
    sends: int = 0
    pulls: int = 0
    first_token_s: float = 0.0
    """From a request's way there to its first token, as measured last."""

    def can_serve(self, group: Group) -> bool:
        """Whether it may stand in this queue."""
        kind = group.kind
        may = self.takes and (kind.model == self.loaded or kind.model in self.swap_s)
        return may and self.name not in kind.exclude and group.begun_on in (None, self.name)

    @property
    def held(self) -> float:
        return self.tokens + self.overrun_tokens

    def send(self, request_id: str, tokens: float, due_s: float, client: str = "") -> None:
        """A request is in flight there."""
        self.sends += 1
        self.is_fresh = False
        self.in_flight[request_id] = client, tokens, due_s
        self.add(client, tokens, due_s)

    def land(self, request_id: str) -> None:
        """It is in flight no more."""
        self.remove(*self.in_flight.pop(request_id))


class VirtualQueues:
    """One queue for each worker. Every group is in one, or in `stranded`."""

    def __init__(self, groups: Groups, estimator: Estimator) -> None:
        self.groups, self.estimator = groups, estimator
        self.workers: dict[str, Worker] = {}
        """By name. Not to be written to."""
        self.stranded: list[int] = []
        self.ignored = 0
        """Entries of plans that named what was not there."""
        self._where: dict[int, str] = {}
        """In whose queue a group is."""
        self.pulled: dict[str, str] = {}
        """Where the requests in flight are. Not to be written to."""
        self._idle: dict[str, tuple[float, int]] = {}
        """Since when a worker is idle, and how many requests it had got by then."""

    # -- workers

    def worker_up(self, worker: Worker) -> None:
        """A worker without requests in flight. What was stranded may come to it."""
        self.worker_down(worker.name)
        self.workers[worker.name] = worker
        self._settle_stranded()

    def worker_down(self, name: str) -> None:
        """It is gone; its groups go to the others."""
        worker = self.workers.pop(name, None)
        if worker is not None:
            self.estimator.forget(name)
            self._leave(worker)

    def taking(self, names: Collection[str]) -> None:
        """These workers take requests, and no other; the queues of those go to the others."""
        for name in sorted(self.workers, key=lambda one: one not in names):  # first those that can take over
            worker = self.workers[name]
            if worker.takes != (name in names):
                worker.takes = name in names
                if worker.takes:
                    self._settle_stranded()
                else:
                    self._leave(worker)

    def equip(self, name: str, has: Equipment) -> None:
        """What a worker has, and can load. What it cannot serve any more goes to the others."""
        worker = self.workers[name]
        worker.loaded = has.loaded
        worker.equip(has)
        self._settle_stranded()
        if not all(worker.can_serve(self.groups.by_number[number]) for number in worker.groups):
            self._leave(worker)

    def loaded(self, name: str, model: str | None) -> None:
        """A worker has this model from now on; None: none that can serve. It is fresh then."""
        worker = self.workers[name]
        if worker.loaded != model:
            worker.stays = False, -inf
            worker.loaded, worker.is_fresh = model, model is not None

    # -- requests

    def settle(self) -> None:
        """Puts groups that are new into queues: to be called when requests were added to `groups`."""
        for group, after in self.groups.drain_born():
            owner = None if after is None else self.owner(after)
            if owner is None or after is None:
                self._settle([group.number])
            else:
                owner.groups.insert(owner.groups.index(after.number) + 1, group.number)
                self._where[group.number] = owner.name

    def pull(self, name: str, now_s: float = -inf, may: May | None = None) -> Request | None:
        """The request that a worker gets; None if it has enough, must load another model first, or may not have it."""
        worker = self.workers[name]
        if not (worker.takes and (worker.evicts or worker.has_room())):
            return None
        group = self._next(worker, now_s)
        if group is None or (may is not None and not may(group.line[0].request, name)):
            return None
        entry = self.groups.take(group, name, lends=self.owner(group) is not worker)
        worker.pulls += 1
        self.send(name, entry.request, entry.promise.due_s)
        return entry.request

    def send(self, name: str, request: Request, due_s: float) -> None:
        """A request is in flight at a worker."""
        tokens = request.input_tokens + request.expected_output_tokens
        self.workers[name].send(request.id, tokens, due_s, request.client)
        self.pulled[request.id] = name

    def ended(self, request_id: str) -> None:
        """A request is over or was given up."""
        self._land(request_id)
        group = self.groups.remove(request_id)
        if group is not None:
            self._drop_if_over(group)

    # -- models

    def wanted(self, name: str, now_s: float = -inf) -> str | None:
        """The model that a worker's queue needs next; the loaded one while that is served first."""
        worker = self.workers[name]
        waiting = self.waiting(worker)
        if worker.is_fresh and any(group.kind.model == worker.loaded for group in waiting):
            return worker.loaded
        if self._stays(worker, waiting, now_s):
            return worker.loaded
        return waiting[0].kind.model if waiting else None

    def take_over(self, now_s: float) -> int:
        """Idle workers take over groups for which they load another model; how many did. O(groups) for each."""
        idle: dict[str, tuple[float, int]] = {}
        for name, worker in self.workers.items():
            able = worker.takes and worker.loaded is not None and len(worker.swap_s) > 1
            if able and not worker.in_flight and not self.waiting(worker):
                known = self._idle.get(name)
                idle[name] = known if known and known[1] == worker.sends else (now_s, worker.sends)
        self._idle = idle
        moved = 0
        for name, (since_s, _) in idle.items():
            worker = self.workers[name]
            group = _worth_loading(self, worker, now_s - since_s, now_s)
            if group is not None:
                self._give(group, worker, whole=group.begun_on is None)
                moved += 1
        return moved

    # -- plans

    def problem(self, now_s: float) -> Problem:
        """What is to be planned: the groups that have some waiting, at all workers that can serve them."""
        demands, paces = [], dict[tuple[str, str], Pace]()
        for group in self.groups:
            able = [one for one in self.workers.values() if one.can_serve(group)] if len(group) else []
            if able:
                demands.append(_demand(self.estimator, group, now_s, able, paces))
        return Problem(demands, [_as_queue(self.estimator, worker) for worker in self.workers.values()])

    def apply(self, plan: Orders) -> None:
        """What is still there of a plan. The rest is ignored and counted: what is not there any more, or never was, is
        named twice, has begun elsewhere or cannot be served there. Groups that it does not name stay at their worker:
        behind those that it does, or in front if they have begun."""
        known, seen = self.groups.by_number, set[int]()
        orders: dict[str, list[int]] = {name: [] for name in self.workers}
        for name, numbers in plan.items():
            for number in numbers:
                group, worker = known.get(number), self.workers.get(name)
                if group is None or worker is None or number in seen or not worker.can_serve(group):
                    self.ignored += 1
                    continue
                seen.add(number)
                orders[name].append(number)
        for name, worker in self.workers.items():
            left = [number for number in worker.groups if number not in seen]
            begun = [number for number in left if known[number].begun_on is not None]
            rest = [number for number in left if known[number].begun_on is None]
            worker.groups = [*begun, *orders[name], *rest]
            self._where.update(dict.fromkeys(worker.groups, name))
        self.stranded = [number for number in self.stranded if number not in seen]

    # -- what is to come

    def slots(self, name: str, now_s: float, groups: Collection[Group] | None = None) -> list[Slot]:
        """When a worker's groups that have some waiting start as its queue is. O(groups)."""
        worker, paces = self.workers[name], dict[tuple[str, str], Pace]()
        chosen = self.waiting(worker) if groups is None else groups
        demands = [_demand(self.estimator, one, now_s, [worker], paces) for one in chosen]
        return list(slots(_as_queue(self.estimator, worker), demands))

    def late(self, now_s: float) -> list[Slot]:
        """The groups that will be late as the queues are: a reason to plan anew. O(groups)."""
        return [slot for name in self.workers for slot in self.slots(name, now_s) if slot.late_s > 0]

    def wait(self, request_id: str, now_s: float) -> Wait | None:
        """How long a request that waits still has to, if it is the last in its group and what is before that in its
        queue goes first; None if that is nowhere. O(groups)."""
        group = self.groups.of(request_id)
        worker = None if group is None else self.owner(group)
        if group is None or worker is None:
            return None
        start_s, ahead, free = 0.0, Ahead(), max(0.0, worker.kv_tokens - worker.held)
        for slot in self.slots(worker.name, now_s):
            if slot.swaps:
                start_s, ahead, free = slot.start_s, Ahead(), 0.0
            ahead = ahead.plus(self.groups.by_number[slot.demand.number])
            if slot.demand.number == group.number:
                break
        wait = self.estimator.wait(worker.name, group.kind.model, ahead, free)
        return Wait(start_s + wait.mean_s, start_s + wait.likely_s)

    def waiting(self, worker: Worker) -> list[Group]:
        """The groups of a queue in which some wait, in its order."""
        known = self.groups.by_number
        return [group for number in worker.groups if (group := known[number]).deadlines]

    def owner(self, group: Group) -> Worker | None:
        """In whose queue a group is."""
        return self.workers.get(self._where.get(group.number, ""))

    def orders(self) -> dict[str, tuple[int, ...]]:
        """The groups of every queue."""
        return {name: tuple(worker.groups) for name, worker in self.workers.items()}

    # -- inside: pulling

    def _next(self, worker: Worker, now_s: float) -> Group | None:
        """The group whose request a worker gets; it may be in another queue: then the request is lent."""
        while True:
            own = self._own(worker, now_s)
            group = None if own is None else self._most_urgent(worker, own, now_s)
            if group is None or group.kind.late:
                return group
            if not self.groups.miss(group, now_s, worker.first_token_s, _MOST_MISSED):
                return group
            self._drop_if_over(group)
            for born, _ in self.groups.drain_born():
                self._put(worker, born.number)

    def _own(self, worker: Worker, now_s: float) -> list[Group] | None:
        """The first groups of the model that is loaded, up to one of another model. None if it has to load that."""
        waiting, model = self.waiting(worker), worker.loaded
        if model is None:
            return None
        if waiting and waiting[0].kind.model != model:
            if not (worker.is_fresh or self._stays(worker, waiting, now_s)):
                return None
            waiting = list(dropwhile(lambda group: group.kind.model != model, waiting))
        return list(takewhile(lambda group: group.kind.model == model, waiting))

    def _most_urgent(self, worker: Worker, own: Sequence[Group], now_s: float) -> Group | None:
        is_overdues_turn = not (worker.pulls + 1) % OVERDUE_EVERY
        order = (True, False) if is_overdues_turn else (False, True)
        may = [one for one in own if _has_room(worker, one)]
        mine = min(may, key=lambda one: (order.index(one.kind.late), one.urgency), default=None)
        for late in order:
            is_same = mine is not None and mine.kind.late == late
            other = self.groups.most_urgent(worker.loaded or "", late, worker.name)
            if other is not None and _has_room(worker, other):
                if mine is None and not worker.groups:
                    return self._steal(worker, late) or other
                if mine is None or not is_same:
                    return other
                if other.urgency < mine.urgency and other.is_in_danger(now_s, DANGER):
                    return other
            if is_same:
                break
        return mine

    def _steal(self, worker: Worker, late: bool) -> Group | None:
        """A group, late or not, comes from the longest of the other queues."""
        found: dict[str, Group] = {}
        for group in self.groups:
            owner = self.owner(group)
            if group.kind.late != late or group.kind.model != worker.loaded or not group.deadlines:
                continue
            if owner is not None and owner is not worker and worker.name not in group.kind.exclude:
                known = found.get(owner.name)
                if known is None or (known.begun_on is not None and group.begun_on is None):
                    found[owner.name] = group
        if not found:
            return None

        def queued_tokens(name: str) -> tuple[float, str]:
            waiting = self.waiting(self.workers[name])
            return sum(one.prompt_tokens + one.output_tokens for one in waiting), name

        name = max(found, key=queued_tokens)
        group, owner = found[name], self.workers[name]
        whole = group.begun_on is None and len(self.waiting(owner)) > 1
        if not whole and len(group) == 1 and group.begun_on is not None:
            return None
        return self._give(group, worker, whole=whole)

    def _give(self, group: Group, worker: Worker, *, whole: bool) -> Group:
        """A group, or the newer half of it, goes into this worker's queue; the group that does."""
        owner = self.owner(group)
        if whole and owner is not None:
            owner.groups.remove(group.number)
            self._put(worker, group.number)
            return group
        newer = self.groups.cut(group)
        self.groups.drain_born()
        self._drop_if_over(group)
        self._put(worker, newer.number)
        return newer

    # -- inside: looking

    def _stays(self, worker: Worker, waiting: Sequence[Group], now_s: float) -> bool:
        """Whether `worker` serves its model first, though its queue begins with another one. Without a time: no."""
        if not waiting or worker.loaded is None or now_s == -inf or waiting[0].kind.model == worker.loaded:
            return False
        if not any(group.kind.model == worker.loaded for group in waiting):
            return False
        if now_s >= worker.stays[1]:
            order = [slot.demand for slot in self.slots(worker.name, now_s, waiting)]
            worker.stays = stays(_as_queue(self.estimator, worker), order), now_s + STAYS_S
        return worker.stays[0]

    # -- inside: standing

    def _land(self, request_id: str) -> None:
        worker = self.workers.get(self.pulled.pop(request_id, ""))
        if worker is not None:
            worker.land(request_id)

    def _put(self, worker: Worker, number: int) -> None:
        """A group comes into a queue, behind all others."""
        worker.groups.append(number)
        self._where[number] = worker.name

    def _drop_if_over(self, group: Group) -> None:
        if group.number in self.groups.by_number:
            return
        name = self._where.pop(group.number, None)
        if name is not None and group.number in self.workers[name].groups:
            self.workers[name].groups.remove(group.number)
        elif group.number in self.stranded:
            self.stranded.remove(group.number)

    def _settle(self, numbers: Sequence[int]) -> None:
        """Each group into the queue where it would start first, behind all others."""
        for number in numbers:
            group = self.groups.by_number.get(number)
            if group is None:
                continue
            able = [name for name, worker in self.workers.items() if worker.can_serve(group)]
            starts = [(self._start_s(name, group), name) for name in able]
            best = min(starts, default=None)
            if best is None:
                self._where.pop(number, None)
                self.stranded.append(number)
            else:
                self._put(self.workers[best[1]], number)

    def _start_s(self, name: str, group: Group) -> float:
        return self.slots(name, 0.0, [*self.waiting(self.workers[name]), group])[-1].start_s

    def _settle_stranded(self) -> None:
        stranded, self.stranded = self.stranded, []
        self._settle(stranded)

    def _leave(self, worker: Worker) -> None:
        """All of a queue goes to the others, as if nothing of it had begun."""
        self.groups.worker_down(worker.name)
        numbers, worker.groups = worker.groups, []
        for number in numbers:
            self._where.pop(number, None)
        self._settle(numbers)
        self.settle()


def _worth_loading(queues: VirtualQueues, worker: Worker, idle_s: float, now_s: float) -> Group | None:
    """The most urgent group of another model that an idle worker gains by loading, if it was idle long enough."""
    others = [one for one in queues.workers.values() if one is not worker]
    patience = 1.0 if any(one.takes and one.loaded == worker.loaded for one in others) else LAST
    found: list[Group] = []
    for owner in others:
        for slot in queues.slots(owner.name, now_s):
            group = queues.groups.by_number[slot.demand.number]
            swap_s = worker.swap_s.get(group.kind.model)
            if swap_s is None or group.kind.model == worker.loaded or worker.name in group.kind.exclude:
                continue
            halves_s = slot.demand.drain_s[owner.name] / 2 if len(group) > 1 else 0.0
            starts_s = slot.start_s + (halves_s if group.begun_on is not None else 0.0)
            if idle_s >= patience * swap_s and starts_s >= 2 * swap_s:
                found.append(group)
    return min(found, key=lambda group: group.urgency, default=None)


def _has_room(worker: Worker, group: Group) -> bool:
    """Whether the next of a group may be sent there."""
    return worker.has_room(None if group.kind.late else group.deadlines[0])


def _demand(
    estimator: Estimator,
    group: Group,
    now_s: float,
    workers: Collection[Worker],
    paces: dict[tuple[str, str], Pace],
) -> Demand:
    """A group as it is planned for these workers. `paces` is filled with what was asked of the estimator."""
    model, drain_s, tail_s = group.kind.model, {}, {}
    for worker in workers:
        key = worker.name, model
        pace = paces.get(key)
        if pace is None:
            pace = paces[key] = estimator.pace(*key)
        drain_s[worker.name] = pace.prompt_s * group.prompt_tokens + pace.output_s * group.output_tokens
        tail_s[worker.name] = pace.tail_s
    waits, is_late = len(group) > 0, group.kind.late
    return Demand(
        number=group.number,
        model=model,
        slack_s=FAR_S if is_late else group.deadlines[0] - now_s if waits else 0.0,
        drain_s=drain_s,
        tail_s=tail_s,
        last_slack_s=group.line[-1].promise.due_s - now_s if waits and not is_late else inf,
        begun_on=group.begun_on,
    )


def _as_queue(estimator: Estimator, worker: Worker) -> Queue:
    runs = worker.in_flight and worker.loaded is not None
    tail_s = estimator.pace(worker.name, worker.loaded or "").tail_s if runs else 0.0
    return Queue(worker.name, worker.loaded, worker.swap_s, 0.0, tail_s)
