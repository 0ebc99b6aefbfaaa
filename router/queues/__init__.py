"""QLM: requests with deadlines wait in groups, and each worker has a queue of groups. Pure.

    line, groups   who waits with whom, and in which order
    shares, fronts who is within its share (tier 0) and who is ahead of it (tier 1)
    estimate       how long a request waits, and how long a group keeps a worker
    problem        what is planned, and what a plan is worth
    weigh, search  the order of groups at each worker; `milp` the same, exactly, for a few. `plan` chooses between both
                   and says what would do if no order is in time
    edf            the order when there is no planner; `replan`: when it is asked, and when it is taken for dead
    virtual        the queues themselves: what a worker pulls next; `apply`: what of a plan still holds
    centres        kinds of requests by their lengths

Source: Patke et al., Queue Management for SLO-Oriented Large Language Model Serving (SoCC 2024). `milp` and `centres`
use scipy and are for the planner's process.
"""
