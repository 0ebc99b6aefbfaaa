"""Whether a worker serves all of its loaded model first before it loads the one that its queue has next.

    stay    if no group of another model is later by that than it is in the order of the queue, with the time of one
            more swap to spare
    not     for groups ahead of their clients' share (tier 1), while one within its share (tier 0) comes first

A swap costs the same whenever it is made, so each that is put off until more waits for the other model saves one. An
order that was made when nothing is late, or by a planner that had to break ties, says little about when to swap; what
it says about lateness is kept.
"""

from collections.abc import Sequence
from dataclasses import replace

from router.queues.problem import Demand, Queue, slots

LOOK_S = 0.25
"""How long the answer holds for a queue."""


def stays(queue: Queue, order: Sequence[Demand]) -> bool:
    """The rule, for the groups of a queue that wait, in its order. O(groups)."""
    if not order or order[0].model == queue.loaded or order[0].model not in queue.swap_s:
        return False
    mine = [one for one in order if one.model == queue.loaded and one.tier <= order[0].tier]
    if not mine:
        return False
    first = {one.number for one in mine}
    others = [one for one in order if one.number not in first]
    as_it_is = {slot.demand.number: slot.late_s for slot in slots(queue, order)}
    later = replace(queue, ahead_s=queue.ahead_s + queue.swap_s[order[0].model])
    return all(
        slot.late_s <= as_it_is[slot.demand.number]
        for slot in slots(later, [*mine, *others])
        if slot.demand.number not in first
    )
