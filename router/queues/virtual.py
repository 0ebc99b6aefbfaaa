"""Virtual queues: in which order each worker gets the groups, what it pulls next, and whether that will be in time.

    new groups  the newer half of a group goes behind the older one; any other one into the queue where it would start
                first, at its place by tier: in front of those of tier 1 that have not begun
    pulling     a worker that has room (`worker`) gets a request of its first groups of the model that is loaded, up to
                the first of another model, which waits for the swap. Of these groups: within its share before ahead of
                it, what can be in time before what is late already, then the earliest deadline
    lending     a worker that has room serves requests of other queues, of its model, that come before its own in tier
                and lateness, or have less than `DANGER` of their time left and are more urgent than its own. So with
                one model and no time to lose, the order is that of a single queue: without it, in a trial, up to 40
                points of attainment were lost to EDF by request, because urgent requests waited in one queue while
                another worker served its own, which had time
    stealing    a worker whose queue is empty takes, from the longest other queue, a whole group of its model that has
                not begun if that queue keeps another one, else the newer half. So nobody waits whom a worker could
                serve that has room and the model, unless it is to load another one
    late        who cannot be in time any more goes behind all of its tier who can. But every `OVERDUE_EVERY`th pull of
                a worker is of who is late longest, within its share before ahead of it, so nobody starves. (The paper
                counts seconds of lateness: one who is late by a minute is worth as much as sixty by a second)
    starting    as `problem` says, with drains and tails as `estimate` has them and, where prefixes count, less what the
                worker holds: so groups are drawn to where their prefix is cached

A worker that is gone leaves its groups to the others. One that can be served nowhere waits in `stranded` until a worker
comes.

Looking at all queues costs O(groups); a pull costs O(1) but for the first groups that have nothing waiting, and the
group's own O(log).
"""

from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from itertools import dropwhile, takewhile
from math import inf
from operator import attrgetter

from router.queues.apply import applied, by_tier
from router.queues.estimate import Ahead, Estimator, Pace, Wait
from router.queues.group import Group, Urgency
from router.queues.groups import Groups
from router.queues.line import Queued
from router.queues.problem import FAR_S, Demand, Orders, Problem, Queue, Slot, slots
from router.queues.staying import LOOK_S, stays
from router.queues.worker import Worker

OVERDUE_EVERY = 8
"""Of so many pulls one is of who is late longest."""
_MOST_MISSED = 32
DANGER = 0.75
"""Who has less than this part of its time left is served by any worker that has room."""
_RANKS = 4
"""Requests that are found to be late with one pull."""

Held = Callable[[Hashable], Mapping[str, int]]
"""How many tokens of a prefix each worker holds."""

Paces = dict[tuple[str, str], Pace]
"""By worker and model, looked up once for many groups."""


class VirtualQueues:
    """One queue for each worker. Every group is in one, or in `stranded`."""

    def __init__(
        self, groups: Groups, estimator: Estimator, held: Held | None = None, *, last_too: bool = True
    ) -> None:
        """`last_too`: the last request of a group has to be in time too, not only the first one as in the paper."""
        self.groups = groups
        self.estimator = estimator
        self._held, self._last_too = held, last_too
        self.workers: dict[str, Worker] = {}
        """By name. Not to be written to."""
        self._pulled: dict[str, str] = {}
        """Where the requests in flight are."""
        self._where: dict[int, str] = {}
        """In whose queue each group is."""
        self.stranded: list[int] = []
        self.ignored = 0
        """Entries of plans that named what was not there."""

    # -- workers

    def worker_up(self, worker: Worker) -> None:
        """A worker without requests in flight. What was stranded may come to it. ValueError if it can load models and
        does not say how long the one takes that is loaded."""
        if worker.swap_s and worker.loaded is not None and worker.loaded not in worker.swap_s:
            raise ValueError(f"{worker.name}: how long it takes to load {worker.loaded} again is not said")
        self.worker_down(worker.name)
        self.workers[worker.name] = worker
        self._where.update(dict.fromkeys(worker.groups, worker.name))
        self._settle(self._take_stranded())

    def worker_down(self, name: str) -> None:
        """It is gone; its groups go to the others."""
        worker = self.workers.pop(name, None)
        if worker is not None:
            self.groups.worker_down(name)
            self.estimator.forget(name)
            self._leave(worker)

    def open(self, name: str, is_open: bool) -> None:
        """Whether a worker takes requests. If not, its queue goes to the others; what it has runs on."""
        worker = self.workers[name]
        if worker.is_open != is_open:
            worker.is_open = is_open
            if is_open:
                self._settle(self._take_stranded())
            else:
                self.groups.worker_down(name)
                self._leave(worker)

    def equip(self, name: str, loaded: str | None, swap_s: Mapping[str, float]) -> None:
        """What a worker has loaded, and can load. What it cannot serve any more goes to the others."""
        worker = self.workers[name]
        worker.loaded, worker.swap_s = loaded, swap_s
        self._settle(self._take_stranded())
        by_number = self.groups.by_number()
        if not all(worker.can_serve(by_number[number]) for number in worker.groups):
            self.groups.worker_down(name)
            self._leave(worker)

    def loaded(self, name: str, model: str | None) -> None:
        """A worker has now this model; None: none that can serve. It is fresh then."""
        worker = self.workers[name]
        if worker.loaded != model:
            worker.stays_until_s = -inf
            worker.loaded, worker.is_fresh = model, model is not None

    # -- requests

    def settle(self) -> None:
        """Put groups that are new into queues: to be called when requests were added to `groups`."""
        for group, after in self.groups.drain_born():
            name = None if after is None else self._where.get(after.number)
            if name is not None and after is not None:
                queue = self.workers[name].groups
                queue.insert(queue.index(after.number) + 1, group.number)
                self._where[group.number] = name
            else:
                self._settle([group.number])

    def pull(self, name: str, now_s: float = -inf) -> Queued | None:
        """The request that a worker gets now; None if it has enough, or has to load another model first."""
        worker = self.workers[name]
        if not (worker.is_open and (worker.evicts or worker.has_room(0))):
            return None
        group = self._next(worker, now_s)
        if group is None:
            return None
        is_own = self._where.get(group.number) == name
        request = self.groups.take(group, name) if is_own else self.groups.lend(group)
        assert request is not None
        worker.pulls += 1
        shared = min(request.prefix_tokens, request.prompt_tokens)
        tokens = request.prompt_tokens + request.expected_output_tokens
        self.send(name, request.id, tokens, request.prefix, shared, request.deadline_s, request.client)
        return request

    def send(
        self,
        name: str,
        request_id: str,
        tokens: float,
        prefix: Hashable | None,
        prefix_tokens: int,
        due_s: float | None = None,
        client: str = "",
    ) -> None:
        """A request is in flight at a worker, as `Worker.send` says."""
        worker = self.workers[name]
        worker.is_fresh = False
        worker.send(request_id, tokens, prefix, prefix_tokens, due_s, client)
        self._pulled[request_id] = name

    def wanted(self, name: str, now_s: float = -inf) -> str | None:
        """The model that a worker's queue needs next; the loaded one while `staying` says so."""
        worker = self.workers[name]
        waiting = self._waiting(worker)
        if worker.is_fresh and any(group.kind.model == worker.loaded for group in waiting):
            return worker.loaded
        if self._stays(worker, waiting, now_s):
            return worker.loaded
        return waiting[0].kind.model if waiting else None

    def next_models(self, name: str) -> tuple[str, ...]:
        """The models that its queue needs after the one that is loaded, the soonest first."""
        worker = self.workers[name]
        models = dict.fromkeys(group.kind.model for group in self._waiting(worker))
        return tuple(model for model in models if model != worker.loaded)

    def ended(self, request_id: str) -> None:
        """A request is over or was given up."""
        self._land(request_id)
        group = self.groups.remove(request_id)
        if group is not None:
            self._drop_if_over(group)

    def taken_back(self, request_id: str) -> None:
        """A request that was pulled waits again, in front of its group."""
        self._land(request_id)
        self.groups.put_back(request_id)

    def judge(self, request_id: str, tier: int) -> None:
        """A request is of this tier now."""
        before = self.groups.of(request_id)
        if self.groups.judge(request_id, tier) is not None and before is not None:
            self._drop_if_over(before)
            self.settle()

    def drain_missed(self) -> list[str]:
        """The requests that were found to be late since the last call."""
        missed, self.groups.missed = self.groups.missed, []
        return missed

    # -- plans

    def apply(self, plan: Orders) -> None:
        """What is still there of a plan. The rest is counted in `ignored`."""
        orders = {name: worker.groups for name, worker in self.workers.items()}
        done = applied(plan, orders, self.groups.by_number(), self._can_serve)
        self.ignored += done.ignored
        for name, order in done.orders.items():
            self.workers[name].groups = order
            self._where.update(dict.fromkeys(order, name))
        placed = {number for order in done.orders.values() for number in order}
        self.stranded = [number for number in self.stranded if number not in placed]

    def problem(self, now_s: float) -> Problem:
        """What a planner is asked: the groups that have somebody waiting, at all workers that can serve them."""
        workers = list(self.workers.values())
        demands, paces = [], Paces()
        for group in self.groups:
            able = [worker for worker in workers if worker.can_serve(group)] if len(group) else []
            if able:
                demands.append(self._demand(group, now_s, able, paces))
        return Problem(demands, [self._as_queue(worker) for worker in workers])

    def late(self, now_s: float) -> list[Slot]:
        """The groups that will be late as the queues are: a reason to plan anew. Asked when workers have pulled what
        they take, so that what fits into free memory is gone. O(groups)."""
        return [
            slot for worker in self.workers.values() for slot in self._slots(worker, now_s) if slot.late_s > 0
        ]

    def slots(self, name: str, now_s: float) -> list[Slot]:
        """When a worker's groups start as its queue is, those that have somebody waiting. O(groups)."""
        return list(self._slots(self.workers[name], now_s))

    def wait(self, request_id: str, now_s: float) -> Wait | None:
        """How long a request that waits still has to, if it is the last in its group; None if that is nowhere. Workers
        that have the model share what is before it, as far as that comes first whatever queue it is in. Where nobody
        has the model, its queue's order counts. O(groups)."""
        group = self.groups.of(request_id)
        if group is None or group.number not in self._where:
            return None
        worker = self.workers[self._where[group.number]]
        model = group.kind.model
        peers = [one for one in self.workers.values() if one.is_open and one.loaded == model]
        if worker in peers and self._waiting(worker)[0].kind.model == model:
            before, share = self._before(group, worker), 1 / len(peers)
            part = Ahead(
                share * before.prompt_tokens, share * before.output_tokens, share**2 * before.output_variance
            )
            free_tokens = share * sum(one.free_tokens for one in peers)
            return self.estimator.wait(worker.name, model, part, free_tokens)
        start_s, ahead, loaded = 0.0, Ahead(), worker.loaded
        for slot in self._slots(worker, now_s):
            other = slot.demand.number
            if slot.swaps:
                start_s, ahead, loaded = slot.start_s, Ahead(), slot.demand.model
            ahead = self._and(ahead, self.groups.by_number()[other], worker)
            if other == group.number:
                break
        free_tokens = worker.free_tokens if loaded == worker.loaded and not start_s else 0.0
        wait = self.estimator.wait(worker.name, model, ahead, free_tokens)
        return Wait(start_s + wait.mean_s, start_s + wait.likely_s)

    def _before(self, group: Group, worker: Worker) -> Ahead:
        """What of the same model goes before the last of a group, and that group: those of lower ranks, and of its own
        rank the part of each group whose deadlines are earlier, taken to be even."""
        last_s, ahead = group.span_s[1], Ahead()
        for other in self.groups:
            if not len(other) or other.kind.model != group.kind.model or other.kind.rank > group.kind.rank:
                continue
            part = 1.0
            if other.kind.rank == group.kind.rank and other is not group:
                first_s, end_s = other.span_s
                part = min(1.0, max(0.0, (last_s - first_s) / max(1e-9, end_s - first_s)))
            all_of_it = self._and(Ahead(), other, worker)
            ahead = Ahead(
                ahead.prompt_tokens + part * all_of_it.prompt_tokens,
                ahead.output_tokens + part * all_of_it.output_tokens,
                ahead.output_variance + part * all_of_it.output_variance,
            )
        return ahead

    # -- what is here

    def orders(self) -> dict[str, tuple[int, ...]]:
        """The groups of every queue."""
        return {name: tuple(worker.groups) for name, worker in self.workers.items()}

    def where(self, request_id: str) -> str | None:
        """The worker at which a request is in flight; None if it is not."""
        return self._pulled.get(request_id)

    def of(self, name: str) -> Worker:
        """KeyError for an unknown worker."""
        return self.workers[name]

    # -- inside

    def _settle(self, numbers: Collection[int]) -> None:
        """Each group into the queue where it would start first."""
        for number in numbers:
            group = self.groups.get(number)
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
                self._where.pop(number, None)
                self.stranded.append(number)
                continue
            self._put(self.workers[best[1]], number)

    def _put(self, worker: Worker, number: int) -> None:
        worker.groups = by_tier([*worker.groups, number], self.groups.by_number())
        self._where[number] = worker.name

    def _leave(self, worker: Worker) -> None:
        """All of its queue goes to the others."""
        groups, worker.groups = worker.groups, []
        self._settle(groups)
        self.settle()

    # -- what a worker pulls

    def _next(self, worker: Worker, now_s: float) -> Group | None:
        """The group whose next request a worker gets that has room. It may be in another queue (`lend`)."""
        own = self._own(worker, now_s)
        if own is None:
            return None
        while True:
            chosen = self._most_urgent(worker, own, now_s)
            if chosen is None or chosen.kind.late:
                return chosen
            if not self.groups.miss(chosen, now_s, worker.first_token_s, _MOST_MISSED):
                return chosen
            own += self._missed(chosen, worker)
            own = [group for group in own if group.deadlines]

    def _own(self, worker: Worker, now_s: float) -> list[Group] | None:
        """Its first groups of the model that is loaded, up to one of another model; None: it is to load that first."""
        by_number, model, own = self.groups.by_number(), worker.loaded, list[Group]()
        for number in worker.groups:
            group = by_number.get(number)
            if group is None or not group.deadlines:
                continue
            if group.kind.model == model:
                own.append(group)
            elif own:
                return own
            else:
                break
        else:
            return own
        waiting = self._waiting(worker)
        if not (worker.is_fresh or self._stays(worker, waiting, now_s)):
            return None
        behind = dropwhile(lambda group: group.kind.model != model, waiting)
        return list(takewhile(lambda group: group.kind.model == model, behind)) or None

    def _most_urgent(self, worker: Worker, own: Sequence[Group], now_s: float) -> Group | None:
        """Of its own groups the most urgent one; one of another queue if it comes before that in tier and lateness, or
        is in danger there and more urgent, or if there is none."""
        turn = not (worker.pulls + 1) % OVERDUE_EVERY
        has_room, some_room = worker.has_room(1), worker.has_room(0)
        may = own
        if not has_room:
            may = [one for one in own if (not one.kind.tier if some_room else _has_room(worker, one))]
        urgency = _overdue_first if turn else _by_urgency
        mine = min(may, key=urgency, default=None)
        if worker.loaded is None:
            return None
        rank = _RANKS if mine is None else mine.kind.rank
        for better in range(min(rank + 1, _RANKS if has_room else _RANKS // 2)):
            other = self.groups.most_urgent(worker.loaded, better, worker.name)
            if other is None or not _has_room(worker, other):
                continue
            if mine is None and not worker.groups:
                return self._steal(worker, better) or other
            if better < rank or (
                mine is not None and urgency(other) < urgency(mine) and other.is_in_danger(now_s, DANGER)
            ):
                return other
        return mine

    def _missed(self, group: Group, worker: Worker) -> list[Group]:
        """Some of a group are late now. If that made a new group it comes into this worker's queue; it is returned."""
        self._drop_if_over(group)
        born = [one for one, _ in self.groups.drain_born()]
        for one in born:
            self._put(worker, one.number)
        return born

    def _steal(self, worker: Worker, rank: int) -> Group | None:
        """A group of the model that is loaded and of this rank comes from the longest of the other queues."""
        assert worker.loaded is not None
        found: dict[str, Group] = {}
        for group in self.groups.of_rank(worker.loaded, rank):
            owner = self._where.get(group.number)
            if owner is None or owner == worker.name or worker.name in group.kind.exclude:
                continue
            known = found.get(owner)
            if known is None or (group.begun_on is not None, group.number) < (
                known.begun_on is not None,
                known.number,
            ):
                found[owner] = group
        if not found:
            return None
        owner = max(found, key=lambda name: (self._queued_tokens(name), name))
        group, queue = found[owner], self.workers[owner].groups
        is_last = sum(len(one) > 0 for one in self._waiting(self.workers[owner])) == 1
        if group.begun_on is None and (len(group) == 1 or not is_last):
            queue.remove(group.number)
        else:
            stem = group
            group = self.groups.cut(group)
            self.groups.drain_born()
            self._drop_if_over(stem)
        self._put(worker, group.number)
        return group

    def _queued_tokens(self, name: str) -> float:
        """Prompts and outputs that wait in a queue."""
        return sum(one.prompt_tokens + one.output_tokens for one in self._waiting(self.workers[name]))

    def _drop_if_over(self, group: Group) -> None:
        if self.groups.get(group.number) is not None:
            return
        name = self._where.pop(group.number, None)
        if name is not None:
            self.workers[name].groups.remove(group.number)
        elif group.number in self.stranded:
            self.stranded.remove(group.number)

    # -- estimates

    def _start_s(self, worker: Worker, group: Group) -> float:
        """When a new group would start at a worker, behind all that may stand before it."""
        ahead = [one for one in self._waiting(worker) if group.is_bound or not one.is_bound]
        *_, last = self._served(worker, [*ahead, group], 0.0)
        return last.start_s

    def _slots(self, worker: Worker, now_s: float) -> Iterator[Slot]:
        return self._served(worker, self._waiting(worker), now_s)

    def _served(self, worker: Worker, groups: Collection[Group], now_s: float) -> Iterator[Slot]:
        """When a worker starts these groups, one after the other."""
        paces = Paces()
        return slots(
            self._as_queue(worker), [self._demand(group, now_s, [worker], paces) for group in groups]
        )

    def _stays(self, worker: Worker, waiting: Sequence[Group], now_s: float) -> bool:
        """Whether `worker` serves its model first, though its queue begins with another one. Without a time: no."""
        if not waiting or waiting[0].kind.model == worker.loaded or now_s == -inf or worker.loaded is None:
            return False
        if not any(group.kind.model == worker.loaded for group in waiting):
            return False
        if now_s >= worker.stays_until_s:
            paces = Paces()
            order = [self._demand(group, now_s, [worker], paces) for group in waiting]
            worker.stays, worker.stays_until_s = stays(self._as_queue(worker), order), now_s + LOOK_S
        return worker.stays

    def _waiting(self, worker: Worker) -> list[Group]:
        found = map(self.groups.by_number().get, worker.groups)
        return [group for group in found if group is not None and group.deadlines]

    def _demand(self, group: Group, now_s: float, workers: Collection[Worker], paces: Paces) -> Demand:
        model, drain_s, tail_s = group.kind.model, {}, {}
        uncached, saved = self._uncached(group)
        for worker in workers:
            key = worker.name, model
            pace = paces.get(key)
            if pace is None:
                pace = paces[key] = self.estimator.pace(*key)
            prompt_s = pace.prompt_s * (uncached - saved.get(worker.name, 0))
            drain_s[worker.name] = prompt_s + pace.output_s * group.output_tokens
            tail_s[worker.name] = pace.tail_s
        waits, is_late = len(group) > 0, group.kind.late
        return Demand(
            number=group.number,
            model=model,
            slack_s=FAR_S if is_late else group.deadline_s - now_s if waits else 0.0,
            last_slack_s=group.last_deadline_s - now_s if waits and self._last_too and not is_late else inf,
            drain_s=drain_s,
            tail_s=tail_s,
            tier=group.kind.tier,
            begun_on=group.begun_on,
            promised=group.promised() if waits and is_late else None,
        )

    def _as_queue(self, worker: Worker) -> Queue:
        runs = worker.in_flight and worker.loaded is not None
        tail_s = self.estimator.tail_s(worker.name, worker.loaded or "") if runs else 0.0
        return Queue(worker.name, worker.loaded, worker.swap_s, 0.0, tail_s)

    def _uncached(self, group: Group) -> tuple[int, Mapping[str, int]]:
        return (group.prompt_tokens, {}) if self._held is None else group.uncached_tokens(self._held)

    def _and(self, ahead: Ahead, group: Group, worker: Worker) -> Ahead:
        uncached, saved = self._uncached(group)
        return Ahead(
            ahead.prompt_tokens + uncached - saved.get(worker.name, 0),
            ahead.output_tokens + group.output_tokens,
            ahead.output_variance + group.output_variance,
        )

    def _can_serve(self, name: str, group: Group) -> bool:
        return self.workers[name].can_serve(group)

    def _take_stranded(self) -> list[int]:
        stranded, self.stranded = self.stranded, []
        return stranded

    def _land(self, request_id: str) -> None:
        worker = self.workers.get(self._pulled.pop(request_id, ""))
        if worker is not None:
            worker.land(request_id)


def _has_room(worker: Worker, group: Group) -> bool:
    """Whether the next of a group may be sent there."""
    return worker.has_room(group.kind.tier, None if group.kind.late else group.deadline_s)


_by_urgency = attrgetter("urgency")


def _overdue_first(group: Group) -> Urgency:
    """Of its tier, who is late goes first."""
    tier, late, urgent_s, number = group.urgency
    return tier, not late, urgent_s, number
