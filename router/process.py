"""How a process is set up that places or relays requests: its limit of open files, and Python's garbage collector."""

import gc
import resource


def raise_limit() -> int:
    """Raises the soft limit of open files, often 1024, to the hard one, for this process and its children. Returns
    it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def collect_young_only() -> None:
    """For a process that keeps a large tree: full collections, which visit every node of it, happen only on request.
    The core leaves no reference cycles behind (a test checks that)."""
    gc.set_threshold(10_000, 10, 1_000_000)


def collect_seldom() -> None:
    """For a process that serves many short requests: what was made so far stays, and need not be looked through again;
    what a request makes is mostly gone without the collector."""
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)
