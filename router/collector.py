"""Python's garbage collector in a process that keeps a large tree.

A full collection visits every node of the tree: some 10 ms for a tree of ten million tokens, and it falls on
whichever request is being placed. The core makes no garbage in cycles (a test watches), so only the young
generations are collected.
"""

import gc


def collect_young_only() -> None:
    """From here on, full collections happen only when asked for."""
    gc.set_threshold(10_000, 10, 1_000_000)
