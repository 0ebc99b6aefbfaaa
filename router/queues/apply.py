"""What of a plan still holds when it comes back: the queues have gone on meanwhile.

A plan names groups and workers. What is not there any more, or never was, is ignored and counted, and so is a group
that is named twice, that has begun elsewhere or that its worker cannot serve. Groups that the plan does not name stay
at their worker: behind those that it does, or in front of them if they have begun. Then nobody of tier 1 stands before
tier 0, whatever the plan says.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from router.queues.group import Group
from router.queues.problem import Orders


class Applied(NamedTuple):
    """The queues after a plan, and how many of its entries were ignored."""

    orders: dict[str, list[int]]
    ignored: int


def applied(
    plan: Orders,
    queues: Orders,
    groups: Mapping[int, Group],
    can_serve: Callable[[str, Group], bool],
) -> Applied:
    """`queues`: all workers, each with its groups, of which every one in `groups` is in one. Each is in one again."""
    orders: dict[str, list[int]] = {worker: [] for worker in queues}
    seen: set[int] = set()
    ignored = 0
    for worker, numbers in plan.items():
        for number in numbers:
            group = groups.get(number)
            if (
                worker not in orders
                or group is None
                or number in seen
                or group.begun_on not in (None, worker)
                or not can_serve(worker, group)
            ):
                ignored += 1
                continue
            seen.add(number)
            orders[worker].append(number)
    for worker, order in queues.items():
        left = [number for number in order if number in groups and number not in seen]
        begun = [number for number in left if groups[number].begun_on is not None]
        orders[worker] = [*begun, *orders[worker], *(number for number in left if number not in begun)]
    return Applied({worker: by_tier(order, groups) for worker, order in orders.items()}, ignored)


def by_tier(order: Sequence[int], groups: Mapping[int, Group]) -> list[int]:
    """The same groups; those of tier 1 that have not begun go behind the last one of tier 0, if one stands before it.
    Else nothing changes."""
    bound = [groups[number].is_bound for number in order]
    last = max((at for at, number in enumerate(order) if not groups[number].kind.tier), default=-1)
    front, back = list(order[: last + 1]), list(order[last + 1 :])
    return [*_keep(front, bound, False), *_keep(front, bound, True), *back]


def _keep(numbers: Iterable[int], bound: Sequence[bool], kept: bool) -> list[int]:
    return [number for number, is_one in zip(numbers, bound, strict=False) if is_one == kept]
