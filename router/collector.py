"""Settings of Python's garbage collector, for a process that keeps a large tree and for one that serves requests.

A full collection visits every node of the tree. That takes about 10 ms for ten million tokens, and delays whichever
request is being placed. The core leaves no reference cycles behind (a test checks that), so collecting the young
generations is enough.
"""

import gc


def collect_young_only() -> None:
    """From now on, full collections happen only on request."""
    gc.set_threshold(10_000, 10, 1_000_000)


def collect_seldom() -> None:
    """For a process that serves many short requests: what was made so far stays, and need not be looked through again;
    what a request makes is mostly gone without the collector."""
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)
