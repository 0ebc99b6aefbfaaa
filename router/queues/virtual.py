"""Virtual queues: in which order each worker gets the groups, what it pulls next, and whether that will be in time.

    new groups  the newer half of a group goes behind the older one; any other one into the queue where it would start
                first, at its place by tier: in front of those of tier 1 that have not begun (`standing`)
    pulling     whose request a worker gets that has room, and what it lends and steals (`pulls`)
    looking     when groups start, and how long a request waits (`outlook`)

A worker that is gone leaves its groups to the others. One that can be served nowhere waits in `stranded` until a worker
comes.
"""

from collections.abc import Collection, Hashable, Mapping, Sequence
from math import inf

from router.queues.estimate import Estimator, Wait
from router.queues.group import Group
from router.queues.groups import Groups
from router.queues.line import Queued
from router.queues.outlook import Held, Outlook
from router.queues.problem import Orders, Problem, Slot
from router.queues.pulls import Pulls
from router.queues.standing import Standing
from router.queues.taking_over import TakingOver
from router.queues.worker import Worker


class VirtualQueues:
    """One queue for each worker. Every group is in one, or in `stranded`."""

    def __init__(self, groups: Groups, estimator: Estimator, held: Held | None = None) -> None:
        self.groups = groups
        self.estimator = estimator
        self._outlook = Outlook(groups, estimator, held)
        self._standing = Standing(groups, self._start_s)
        self._taking_over = TakingOver(groups, self._standing, self._outlook)
        self._pulls = Pulls(groups, self._standing, self._outlook)
        self._pulled: dict[str, str] = {}
        """Where the requests in flight are."""

    # -- workers

    def worker_up(self, worker: Worker) -> None:
        """A worker without requests in flight. What was stranded may come to it. ValueError if it can load models and
        does not say how long the one takes that is loaded."""
        if worker.swap_s and worker.loaded is not None and worker.loaded not in worker.swap_s:
            raise ValueError(f"{worker.name}: how long it takes to load {worker.loaded} again is not said")
        self.worker_down(worker.name)
        self._standing.add(worker)
        self._standing.settle_stranded()

    def worker_down(self, name: str) -> None:
        """It is gone; its groups go to the others."""
        worker = self._standing.remove(name)
        if worker is not None:
            self.groups.worker_down(name)
            self.estimator.forget(name)
            self._standing.leave(worker)

    def open(self, name: str, is_open: bool) -> None:
        """Whether a worker takes requests. If not, its queue goes to the others; what it has runs on."""
        worker = self.workers[name]
        if worker.is_open != is_open:
            worker.is_open = is_open
            if is_open:
                self._standing.settle_stranded()
            else:
                self.groups.worker_down(name)
                self._standing.leave(worker)

    def taking(self, names: Collection[str]) -> None:
        """These workers take requests, and no other."""
        for name in sorted(self.workers, key=lambda one: one not in names):  # first those that can take over
            self.open(name, name in names)

    def equip(self, name: str, loaded: str | None, swap_s: Mapping[str, float]) -> None:
        """What a worker has loaded, and can load. What it cannot serve any more goes to the others."""
        worker = self.workers[name]
        worker.loaded, worker.swap_s = loaded, swap_s
        self._standing.settle_stranded()
        by_number = self.groups.by_number()
        if not all(worker.can_serve(by_number[number]) for number in worker.groups):
            self.groups.worker_down(name)
            self._standing.leave(worker)

    def loaded(self, name: str, model: str | None) -> None:
        """A worker has now this model; None: none that can serve. It is fresh then."""
        worker = self.workers[name]
        if worker.loaded != model:
            worker.stays_until_s = -inf
            worker.loaded, worker.is_fresh = model, model is not None

    # -- requests

    def settle(self) -> None:
        """Put groups that are new into queues: to be called when requests were added to `groups`."""
        self._standing.settle_born()

    def pull(self, name: str, now_s: float = -inf) -> Queued | None:
        """The request that a worker gets now; None if it has enough, or has to load another model first."""
        worker = self.workers[name]
        if not (worker.is_open and (worker.evicts or worker.has_room(0))):
            return None
        group = self._pulls.next(worker, now_s)
        if group is None:
            return None
        is_own = self._standing.where(group.number) is worker
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
        waiting = self._standing.waiting(worker)
        if worker.is_fresh and any(group.kind.model == worker.loaded for group in waiting):
            return worker.loaded
        if self._outlook.stays(worker, waiting, now_s):
            return worker.loaded
        return waiting[0].kind.model if waiting else None

    def next_models(self, name: str) -> tuple[str, ...]:
        """The models that its queue needs after the one that is loaded, the soonest first."""
        worker = self.workers[name]
        models = dict.fromkeys(group.kind.model for group in self._standing.waiting(worker))
        return tuple(model for model in models if model != worker.loaded)

    def ended(self, request_id: str) -> None:
        """A request is over or was given up."""
        self._land(request_id)
        group = self.groups.remove(request_id)
        if group is not None:
            self._standing.drop_if_over(group)

    def taken_back(self, request_id: str) -> None:
        """A request that was pulled waits again, in front of its group."""
        self._land(request_id)
        self.groups.put_back(request_id)

    def judge(self, request_id: str, tier: int) -> None:
        """A request is of this tier now."""
        before = self.groups.of(request_id)
        if self.groups.judge(request_id, tier) is not None and before is not None:
            self._standing.drop_if_over(before)
            self.settle()

    def rename(self, request: Queued, model: str) -> Queued:
        """A request that waits is for this model; to be followed by `settle`. The request as it is then."""
        tier, renamed = self.tier(request.id), request.of_model(model)
        self.ended(request.id)
        self.groups.add(renamed, tier)
        return renamed

    def drain_missed(self) -> list[str]:
        """The requests that were found to be late since the last call."""
        missed, self.groups.missed = self.groups.missed, []
        return missed

    # -- plans

    def apply(self, plan: Orders) -> None:
        """What is still there of a plan. The rest is counted in `ignored`."""
        self._standing.apply(plan)

    def problem(self, now_s: float) -> Problem:
        """What a planner is asked: the groups that have somebody waiting, at all workers that can serve them."""
        return self._outlook.problem(list(self.workers.values()), now_s)

    def late(self, now_s: float) -> list[Slot]:
        """The groups that will be late as the queues are: a reason to plan anew. Asked when workers have pulled what
        they take, so that what fits into free memory is gone. O(groups)."""
        return [slot for name in self.workers for slot in self.slots(name, now_s) if slot.late_s > 0]

    def take_over(self, now_s: float) -> int:
        """Idle workers take groups over for which they load another model; how many did. O(groups) for each."""
        return self._taking_over.look(now_s)

    def slots(self, name: str, now_s: float) -> list[Slot]:
        """When a worker's groups start as its queue is, those that have somebody waiting. O(groups)."""
        worker = self.workers[name]
        return list(self._outlook.slots(worker, self._standing.waiting(worker), now_s))

    def wait(self, request_id: str, now_s: float) -> Wait | None:
        """How long a request that waits still has to, if it is the last in its group; None if that is nowhere.
        O(groups)."""
        group = self.groups.of(request_id)
        worker = None if group is None else self._standing.where(group.number)
        if group is None or worker is None:
            return None
        return self._outlook.wait(group, worker, self._standing, now_s)

    # -- what is here

    @property
    def workers(self) -> Mapping[str, Worker]:
        """By name."""
        return self._standing.workers

    @property
    def stranded(self) -> Sequence[int]:
        """Groups that nobody can serve."""
        return self._standing.stranded

    @property
    def ignored(self) -> int:
        """Entries of plans that named what was not there."""
        return self._standing.ignored

    def orders(self) -> dict[str, tuple[int, ...]]:
        """The groups of every queue."""
        return {name: tuple(worker.groups) for name, worker in self.workers.items()}

    def tier(self, request_id: str) -> int:
        """Of a request that waits, or was pulled. KeyError for an unknown one."""
        group = self.groups.of(request_id)
        if group is None:
            raise KeyError(request_id)
        return group.kind.tier

    def where(self, request_id: str) -> str | None:
        """The worker at which a request is in flight; None if it is not."""
        return self._pulled.get(request_id)

    def of(self, name: str) -> Worker:
        """KeyError for an unknown worker."""
        return self.workers[name]

    # -- inside

    def _start_s(self, worker: Worker, group: Group) -> float:
        return self._outlook.start_s(worker, self._standing.waiting(worker), group)

    def _land(self, request_id: str) -> None:
        worker = self.workers.get(self._pulled.pop(request_id, ""))
        if worker is not None:
            worker.land(request_id)
