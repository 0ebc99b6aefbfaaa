"""The order when nobody plans: earliest deadline first by tier, the loaded model first while slack allows.

Groups go to the queue where they would start first, in order of tier and deadline. In a queue the most urgent one is
next; but groups of the model that is loaded go before one of another model as long as that still starts in time, so a
deadline of an hour does not cause a swap now. Plain EDF (`patient` False) swaps as it goes.

It costs O(groups · queues) and is what a router does by itself if the planner is dead, and where the search starts.
"""

from collections.abc import Callable, Sequence

from router.queues.problem import Demand, Problem, Queue, can_serve


def urgency(demand: Demand) -> tuple[bool, float, int]:
    """Begun or of tier 0 before tier 1, then the earliest deadline."""
    return demand.is_bound, demand.slack_s, demand.number


def edf(problem: Problem, *, patient: bool = True) -> dict[str, list[int]]:
    """Orders for all queues, with each group once."""
    assigned = assign(problem, urgency)
    orders = {}
    for queue in problem.queues:
        order = assigned[queue.worker]
        if patient:
            order = wait_with_swaps(queue, order)
        orders[queue.worker] = [demand.number for demand in order]
    return orders


def assign(problem: Problem, by: Callable[[Demand], tuple[bool, float, int]]) -> dict[str, list[Demand]]:
    """Groups in order of `by`, each to the queue where it would start first. Of equal ones the first queue."""
    queues = problem.queues
    now_s = [queue.ahead_s for queue in queues]
    tail_s = [queue.tail_s for queue in queues]
    models = [queue.loaded for queue in queues]
    assigned: list[list[Demand]] = [[] for _ in queues]
    for demand in sorted(problem.demands, key=by):
        best, start_s = -1, 0.0
        for at, queue in enumerate(queues):
            if not can_serve(queue, demand):
                continue
            switch_s = tail_s[at] + queue.swap_s[demand.model] if models[at] != demand.model else 0.0
            if best < 0 or now_s[at] + switch_s < start_s:
                best, start_s = at, now_s[at] + switch_s
        worker = queues[best].worker
        now_s[best] = start_s + demand.drain_s[worker]
        tail_s[best], models[best] = demand.tail_s.get(worker, 0.0), demand.model
        assigned[best].append(demand)
    return {queue.worker: order for queue, order in zip(queues, assigned, strict=True)}


def wait_with_swaps(queue: Queue, order: Sequence[Demand]) -> list[Demand]:
    """The same groups, which come in order of urgency; those of the model that is loaded before a switch that has
    time. Tiers are kept."""
    left, done = list(order), list[Demand]()
    now_s, tail_s, model = queue.ahead_s, queue.tail_s, queue.loaded
    while left:
        urgent = left[0]
        chosen = urgent
        if urgent.model != model:
            same = next((one for one in left if one.model == model), None)
            if same is not None and urgency(same)[0] == urgency(urgent)[0]:
                free_s = now_s + same.drain_s[queue.worker]
                free_s += same.tail_s.get(queue.worker, 0.0) + queue.swap_s[urgent.model]
                if free_s <= urgent.slack_s:
                    chosen = same
        switch_s = tail_s + queue.swap_s[chosen.model] if chosen.model != model else 0.0
        now_s += switch_s + chosen.drain_s[queue.worker]
        tail_s, model = chosen.tail_s.get(queue.worker, 0.0), chosen.model
        left.remove(chosen)
        done.append(chosen)
    return done
