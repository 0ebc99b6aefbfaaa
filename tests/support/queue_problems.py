"""Random problems to be planned, and their best orders by looking at all."""

from collections.abc import Iterator
from itertools import permutations, product
from random import Random

from router.placement.qlm.problem import Demand, Orders, Problem, Queue, Worth, can_serve, worth


def a_problem(rng: Random, groups: int, workers: int, models: int = 2, tight: float = 1.0) -> Problem:
    """Groups of some seconds at workers of different speed. With `tight` above 1 nearly all can be in time."""
    names = [f"w{number}" for number in range(workers)]
    kinds = [f"m{number}" for number in range(models)]
    queues = [
        Queue(
            name,
            rng.choice([None, *kinds]),
            {kind: rng.choice([3.0, 8.0, 15.0]) for kind in kinds},
            rng.choice([0.0, 0.0, 2.0]),
            rng.choice([0.0, 5.0]),
        )
        for name in names
    ]
    demands = []
    for number in range(groups):
        able = [name for name in names if rng.random() < 0.9] or names[:1]
        drain_s = rng.uniform(2, 30)
        slack_s = rng.uniform(-2, tight * 20 * groups / workers)
        demands.append(
            Demand(
                number=100 + number,
                model=rng.choice(kinds),
                slack_s=slack_s,
                drain_s={name: drain_s * rng.uniform(0.7, 1.3) for name in able},
                tail_s={name: rng.uniform(2, 8) for name in able},
                last_slack_s=rng.choice([float("inf"), slack_s + rng.uniform(0, 40)]),
                begun_on=rng.choice(able) if rng.random() < 0.15 else None,
            )
        )
    return Problem(demands, queues)


def all_orders(problem: Problem) -> Iterator[dict[str, tuple[int, ...]]]:
    """Every plan without a fault. For very few groups."""
    numbers = [demand.number for demand in problem.demands]
    for chosen in product(problem.queues, repeat=len(numbers)):
        if not all(can_serve(queue, demand) for queue, demand in zip(chosen, problem.demands, strict=True)):
            continue
        shares = [
            [number for number, own in zip(numbers, chosen, strict=True) if own is queue]
            for queue in problem.queues
        ]
        for orders in product(*(permutations(share) for share in shares)):
            found = {queue.worker: order for queue, order in zip(problem.queues, orders, strict=True)}
            if not faults(problem, found):
                yield found


def best_of_all(problem: Problem) -> Worth:
    """By looking at every plan."""
    return min(worth(problem, orders).rounded() for orders in all_orders(problem))


def faults(problem: Problem, orders: Orders) -> list[str]:
    """What is wrong with a plan for this problem; empty for one that every group is in once, where it can be served,
    and that leaves what has begun at its worker."""
    queues = {queue.worker: queue for queue in problem.queues}
    demands = {demand.number: demand for demand in problem.demands}
    found, seen = [], set[int]()
    for worker, order in orders.items():
        if worker not in queues:
            found.append(f"there is no worker {worker}")
            continue
        for number in order:
            if number not in demands or number in seen:
                found.append(f"group {number} is {'there twice' if number in seen else 'not there'}")
                continue
            seen.add(number)
            if not can_serve(queues[worker], demands[number]):
                found.append(f"group {number} cannot be served by {worker}")
    found += [f"group {number} is in no queue" for number in demands if number not in seen]
    return found
