"""What is to come in the queues: when groups start, which will be late, how long a request waits, what is planned.

    starting    as `problem` says, with drains and tails as `estimate` has them and, where prefixes count, less what the
                worker holds: so groups are drawn to where their prefix is cached

Looking at a queue costs O(its groups), looking at all of them O(groups).
"""

from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from math import inf

from router.queues.estimate import Ahead, Estimator, Pace, Wait
from router.queues.group import Group
from router.queues.groups import Groups
from router.queues.problem import FAR_S, Demand, Problem, Queue, Slot, slots
from router.queues.standing import Standing
from router.queues.staying import LOOK_S, stays
from router.queues.worker import Worker

Held = Callable[[Hashable], Mapping[str, int]]
"""How many tokens of a prefix each worker holds."""

Paces = dict[tuple[str, str], Pace]
"""By worker and model, looked up once for many groups."""


class Outlook:
    """Looks at queues, and changes nothing but what it remembers of `stays`."""

    def __init__(self, groups: Groups, estimator: Estimator, held: Held | None) -> None:
        self._groups, self._estimator = groups, estimator
        self._held = held

    def problem(self, workers: Sequence[Worker], now_s: float) -> Problem:
        """What a planner is asked: the groups that have somebody waiting, at all workers that can serve them."""
        demands, paces = [], Paces()
        for group in self._groups:
            able = [worker for worker in workers if worker.can_serve(group)] if len(group) else []
            if able:
                demands.append(self._demand(group, now_s, able, paces))
        return Problem(demands, [self._as_queue(worker) for worker in workers])

    def slots(self, worker: Worker, groups: Collection[Group], now_s: float) -> Iterator[Slot]:
        """When a worker starts these groups, one after the other."""
        paces = Paces()
        return slots(
            self._as_queue(worker), [self._demand(group, now_s, [worker], paces) for group in groups]
        )

    def start_s(self, worker: Worker, waiting: Sequence[Group], group: Group) -> float:
        """When a new group would start at a worker, behind all of those that wait there that may stand before it."""
        ahead = [one for one in waiting if group.is_bound or not one.is_bound]
        *_, last = self.slots(worker, [*ahead, group], 0.0)
        return last.start_s

    def stays(self, worker: Worker, waiting: Sequence[Group], now_s: float) -> bool:
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

    def wait(self, group: Group, worker: Worker, standing: Standing, now_s: float) -> Wait:
        """How long the last of a group still waits, which stands in this worker's queue. Workers that have the model
        share what is before it, as far as that comes first whatever queue it is in. Where nobody has the model, its
        queue's order counts."""
        model, waiting = group.kind.model, standing.waiting(worker)
        peers = [one for one in standing.workers.values() if one.is_open and one.loaded == model]
        if worker in peers and waiting[0].kind.model == model:
            before, share = self._before(group, worker), 1 / len(peers)
            part = Ahead(
                share * before.prompt_tokens, share * before.output_tokens, share**2 * before.output_variance
            )
            free_tokens = share * sum(one.free_tokens for one in peers)
            return self._estimator.wait(worker.name, model, part, free_tokens)
        start_s, ahead, loaded = 0.0, Ahead(), worker.loaded
        for slot in self.slots(worker, waiting, now_s):
            other = slot.demand.number
            if slot.swaps:
                start_s, ahead, loaded = slot.start_s, Ahead(), slot.demand.model
            ahead = self._and(ahead, self._groups.by_number()[other], worker)
            if other == group.number:
                break
        free_tokens = worker.free_tokens if loaded == worker.loaded and not start_s else 0.0
        wait = self._estimator.wait(worker.name, model, ahead, free_tokens)
        return Wait(start_s + wait.mean_s, start_s + wait.likely_s)

    # -- inside

    def _before(self, group: Group, worker: Worker) -> Ahead:
        """What of the same model goes before the last of a group, and that group: those of lower ranks, and of its own
        rank the part of each group whose deadlines are earlier, taken to be even."""
        last_s, ahead = group.span_s[1], Ahead()
        for other in self._groups:
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

    def _demand(self, group: Group, now_s: float, workers: Collection[Worker], paces: Paces) -> Demand:
        model, drain_s, tail_s = group.kind.model, {}, {}
        uncached, saved = self._uncached(group)
        for worker in workers:
            key = worker.name, model
            pace = paces.get(key)
            if pace is None:
                pace = paces[key] = self._estimator.pace(*key)
            prompt_s = pace.prompt_s * (uncached - saved.get(worker.name, 0))
            drain_s[worker.name] = prompt_s + pace.output_s * group.output_tokens
            tail_s[worker.name] = pace.tail_s
        waits, is_late = len(group) > 0, group.kind.late
        return Demand(
            number=group.number,
            model=model,
            slack_s=FAR_S if is_late else group.deadline_s - now_s if waits else 0.0,
            last_slack_s=group.last_deadline_s - now_s if waits and not is_late else inf,
            drain_s=drain_s,
            tail_s=tail_s,
            tier=group.kind.tier,
            begun_on=group.begun_on,
            promised=group.promised() if waits and is_late else None,
        )

    def _as_queue(self, worker: Worker) -> Queue:
        runs = worker.in_flight and worker.loaded is not None
        tail_s = self._estimator.tail_s(worker.name, worker.loaded or "") if runs else 0.0
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
