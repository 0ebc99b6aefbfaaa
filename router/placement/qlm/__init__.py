"""The method of QLM as one placement, beside others: `placement.Qlm`. All of it is pure.

    groups      requests that are planned as one
    queues      a virtual queue of groups for each worker: pulling, lending, eviction, swapping, load balancing
    estimate    how long a request waits, and how long a group keeps a worker
    problem     what is planned, and what a plan is worth; earliest deadline first
    search      the global scheduler, in a process of its own, exact for a few groups

Source: Patke et al., Queue Management for SLO-Oriented Large Language Model Serving (SoCC 2024).
"""

from router.placement.qlm.placement import Qlm

__all__ = ["Qlm"]
