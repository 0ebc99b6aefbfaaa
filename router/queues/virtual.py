"""Virtual queues: in which order each worker gets the groups, what it pulls next, and whether that will be in time.

    new groups  the newer half of a group goes behind the older one; any other one into the queue where it would start
                first, at its place by tier: in front of those of tier 1 that have not begun
    pulling     a worker gets the next request of its first group that has one waiting, if that is of the model that is
                loaded, while its tokens in flight (prompts and expected outputs) are below its KV cache and one prefill
                chunk. So when all of a group has begun, the next one of the same model follows; one of another model
                waits for the swap. Counting tokens, not slots, keeps batches full whatever the lengths are
    starting    as `problem` says, with drains and tails as `estimate` has them and, where prefixes count, less what the
                worker holds: so groups are drawn to where their prefix is cached

A worker that is gone leaves its groups to the others. One that can be served nowhere waits in `stranded` until a worker
comes.

Looking at all queues costs O(groups); a pull costs O(1) but for the first groups that have nothing waiting, and the
group's own O(log).
"""

from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from math import inf

from router.queues.apply import applied, by_tier
from router.queues.estimate import Ahead, Estimator, Pace, Wait
from router.queues.groups import Group, Groups
from router.queues.line import Queued
from router.queues.problem import Demand, Orders, Problem, Queue, Slot, slots

Cached = Callable[[str, Hashable], int]
"""How many tokens of a prefix a worker holds."""


Paces = dict[tuple[str, str], Pace]
"""By worker and model, looked up once for many groups."""


@dataclass(slots=True)
class Worker:
    """A worker with its queue. `swap_s`: the models that it can load and how long that takes, the loaded one too;
    empty: it keeps that."""

    name: str
    loaded: str | None
    kv_tokens: int
    chunk_tokens: int = 8_192
    swap_s: Mapping[str, float] = field(default_factory=dict)
    groups: list[int] = field(default_factory=list)
    in_flight: dict[str, float] = field(default_factory=dict)
    """Tokens that each request that was pulled may take."""
    in_flight_tokens: float = 0.0

    def can_serve(self, group: Group) -> bool:
        """Whether it may stand in this queue."""
        kind = group.kind
        has_model = kind.model == self.loaded or kind.model in self.swap_s
        return has_model and self.name not in kind.exclude and group.begun_on in (None, self.name)

    @property
    def is_full(self) -> bool:
        """It pulls nothing more. What it does while it is full is what rates are learnt from."""
        return self.in_flight_tokens >= self.kv_tokens + self.chunk_tokens

    @property
    def free_tokens(self) -> float:
        """Of the KV cache, promised to nobody."""
        return max(0.0, self.kv_tokens - self.in_flight_tokens)


class VirtualQueues:
    """One queue for each worker. Every group is in one, or in `stranded`."""

    def __init__(
        self, groups: Groups, estimator: Estimator, cached: Cached | None = None, *, last_too: bool = True
    ) -> None:
        """`last_too`: the last request of a group has to be in time too, not only the first one as in the paper."""
        self.groups = groups
        self.estimator = estimator
        self._cached, self._last_too = cached, last_too
        self._workers: dict[str, Worker] = {}
        self._pulled: dict[str, str] = {}
        """Where the requests in flight are."""
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
        self._workers[worker.name] = worker
        self._settle(self._take_stranded())

    def worker_down(self, name: str) -> None:
        """It is gone; its groups go to the others."""
        worker = self._workers.pop(name, None)
        if worker is not None:
            self.groups.worker_down(name)
            self.estimator.forget(name)
            self._settle(worker.groups)
            self.settle()

    def loaded(self, name: str, model: str | None) -> None:
        """A worker has now this model; None: none that can serve."""
        self._workers[name].loaded = model

    # -- requests

    def settle(self) -> None:
        """Put groups that are new into queues: to be called when requests were added to `groups`."""
        for group, after in self.groups.drain_born():
            queue = self._queue_of(after) if after is not None else None
            if queue is not None and after is not None:
                queue.insert(queue.index(after.number) + 1, group.number)
            else:
                self._settle([group.number])

    def pull(self, name: str) -> Queued | None:
        """The request that a worker gets now; None if it has enough, or has to load another model first."""
        worker = self._workers[name]
        if worker.is_full:
            return None
        group = self._first(worker)
        if group is None or group.kind.model != worker.loaded:
            return None
        request = self.groups.take(group, name)
        assert request is not None
        tokens = request.prompt_tokens + request.expected_output_tokens
        worker.in_flight[request.id] = tokens
        self._pulled[request.id] = name
        worker.in_flight_tokens += tokens
        return request

    def wanted(self, name: str) -> str | None:
        """The model that a worker's queue needs next."""
        group = self._first(self._workers[name])
        return None if group is None else group.kind.model

    def ended(self, request_id: str) -> None:
        """A request is over or was given up."""
        self._land(request_id)
        group = self.groups.remove(request_id)
        if group is not None and self.groups.get(group.number) is None:
            queue = self._queue_of(group)
            if queue is not None:
                queue.remove(group.number)
            elif group.number in self.stranded:
                self.stranded.remove(group.number)

    def taken_back(self, request_id: str) -> None:
        """A request that was pulled waits again, in front of its group."""
        self._land(request_id)
        self.groups.put_back(request_id)

    def judge(self, request_id: str, tier: int) -> None:
        """A request is of this tier now."""
        before = self.groups.of(request_id)
        after = self.groups.judge(request_id, tier)
        if before is not None and after is not None and self.groups.get(before.number) is None:
            queue = self._queue_of(before)
            (self.stranded if queue is None else queue).remove(before.number)
        self.settle()

    # -- plans

    def apply(self, plan: Orders) -> None:
        """What is still there of a plan. The rest is counted in `ignored`."""
        orders = {name: worker.groups for name, worker in self._workers.items()}
        done = applied(plan, orders, self.groups.by_number(), self._can_serve)
        self.ignored += done.ignored
        for name, order in done.orders.items():
            self._workers[name].groups = order
        placed = {number for order in done.orders.values() for number in order}
        self.stranded = [number for number in self.stranded if number not in placed]

    def problem(self, now_s: float) -> Problem:
        """What a planner is asked: the groups that have somebody waiting, at all workers that can serve them."""
        workers = list(self._workers.values())
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
            slot
            for worker in self._workers.values()
            for slot in self._slots(worker, now_s)
            if slot.late_s > 0
        ]

    def wait(self, request_id: str, now_s: float) -> Wait | None:
        """How long a request that waits still has to, if it is the last in its group; None if that is nowhere.
        O(groups in front)."""
        group = self.groups.of(request_id)
        worker = next(
            (one for one in self._workers.values() if group is not None and group.number in one.groups), None
        )
        if group is None or worker is None:
            return None
        start_s, ahead, model = 0.0, Ahead(), worker.loaded
        for slot in self._slots(worker, now_s):
            other = slot.demand.number
            if slot.swaps:
                start_s, ahead, model = slot.start_s, Ahead(), slot.demand.model
            ahead = self._and(ahead, self.groups.by_number()[other], worker)
            if other == group.number:
                break
        free_tokens = worker.free_tokens if model == worker.loaded and not start_s else 0.0
        wait = self.estimator.wait(worker.name, group.kind.model, ahead, free_tokens)
        return Wait(start_s + wait.mean_s, start_s + wait.likely_s)

    # -- what is here

    def orders(self) -> dict[str, tuple[int, ...]]:
        """The groups of every queue."""
        return {name: tuple(worker.groups) for name, worker in self._workers.items()}

    def of(self, name: str) -> Worker:
        """KeyError for an unknown worker."""
        return self._workers[name]

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
                    for name, worker in self._workers.items()
                    if worker.can_serve(group)
                ),
                default=None,
            )
            if best is None:
                self.stranded.append(number)
                continue
            worker = self._workers[best[1]]
            worker.groups = by_tier([*worker.groups, number], self.groups.by_number())

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

    def _waiting(self, worker: Worker) -> list[Group]:
        found = [self.groups.get(number) for number in worker.groups]
        return [group for group in found if group is not None and len(group)]

    def _first(self, worker: Worker) -> Group | None:
        """The first of its groups that has somebody waiting."""
        for number in worker.groups:
            group = self.groups.get(number)
            if group is not None and len(group):
                return group
        return None

    def _demand(self, group: Group, now_s: float, workers: Collection[Worker], paces: Paces) -> Demand:
        model, drain_s, tail_s = group.kind.model, {}, {}
        for worker in workers:
            key = worker.name, model
            pace = paces.get(key)
            if pace is None:
                pace = paces[key] = self.estimator.pace(*key)
            prompt_s = pace.prompt_s * self._uncached(group, worker.name)
            drain_s[worker.name] = prompt_s + pace.output_s * group.output_tokens
            tail_s[worker.name] = pace.tail_s
        waits = len(group) > 0
        return Demand(
            number=group.number,
            model=model,
            slack_s=group.deadline_s - now_s if waits else 0.0,
            last_slack_s=group.last_deadline_s - now_s if waits and self._last_too else inf,
            drain_s=drain_s,
            tail_s=tail_s,
            tier=group.kind.tier,
            begun_on=group.begun_on,
        )

    def _as_queue(self, worker: Worker) -> Queue:
        runs = worker.in_flight and worker.loaded is not None
        tail_s = self.estimator.tail_s(worker.name, worker.loaded or "") if runs else 0.0
        return Queue(worker.name, worker.loaded, worker.swap_s, 0.0, tail_s)

    def _uncached(self, group: Group, worker: str) -> int:
        cached = self._cached
        if cached is None:
            return group.prompt_tokens
        return group.uncached_tokens(lambda prefix: cached(worker, prefix))

    def _and(self, ahead: Ahead, group: Group, worker: Worker) -> Ahead:
        return Ahead(
            ahead.prompt_tokens + self._uncached(group, worker.name),
            ahead.output_tokens + group.output_tokens,
            ahead.output_variance + group.output_variance,
        )

    def _can_serve(self, name: str, group: Group) -> bool:
        return self._workers[name].can_serve(group)

    def _queue_of(self, group: Group) -> list[int] | None:
        return next((one.groups for one in self._workers.values() if group.number in one.groups), None)

    def _take_stranded(self) -> list[int]:
        stranded, self.stranded = self.stranded, []
        return stranded

    def _land(self, request_id: str) -> None:
        worker = self._workers.get(self._pulled.pop(request_id, ""))
        tokens = None if worker is None else worker.in_flight.pop(request_id, None)
        if worker is not None and tokens is not None:
            worker.in_flight_tokens = worker.in_flight_tokens - tokens if worker.in_flight else 0.0
