"""Where in the tree a block ends that KV events name by its hash.

A block's hash stands for all tokens up to its end, whichever worker names it, so one map serves all workers. The
blocks that one event names are kept as one run, with the place where the last of them ends.

The map is never swept as a whole: each new run looks after two older ones and forgets their blocks that nobody holds
any more, so it has at most about twice as many entries as there are blocks.
"""

from collections import deque
from collections.abc import Iterator
from itertools import groupby

from router.radix.node import Node, live, spanning

_LOOKED_AFTER = 2
"""Older runs that are looked after when a new one comes."""


class Run:
    """The hashes of consecutive blocks that one event named; the last block ends at `end`, in or above `leaf`."""

    __slots__ = ("block_tokens", "end", "hashes", "leaf")

    def __init__(self, hashes: tuple[int, ...], leaf: Node, end: int, block_tokens: int) -> None:
        self.hashes = hashes
        self.leaf = leaf
        self.end = end
        self.block_tokens = block_tokens

    def end_of(self, block: int) -> int:
        """The depth at which a block of this run ends."""
        return self.end if block == self.hashes[-1] else self.end_at(self.hashes.index(block))

    def end_of_first(self, blocks: list[int]) -> int:
        """The depth at which the first of `blocks` ends; all of them are in this run."""
        first = self.hashes.index(blocks[0])
        if self.hashes[first : first + len(blocks)] == tuple(blocks):
            return self.end_at(first)
        return self.end_at(min(map(self.hashes.index, blocks)))

    def end_at(self, index: int) -> int:
        """The depth at which block number `index` of this run ends."""
        return self.end - (len(self.hashes) - 1 - index) * self.block_tokens

    def node_at(self, bit: int, end: int) -> Node | None:
        """The node that spans depth `end` of this run, if worker `bit` is confirmed to hold it."""
        node = spanning(self.leaf, end)
        return node if node.attached and node.confirmed & bit else None


class BlockIndex:
    """Block hash -> the run that it is part of."""

    def __init__(self) -> None:
        self.runs: deque[Run] = deque()
        """In the order in which they are looked after."""
        self._run_of: dict[int, Run] = {}

    def __len__(self) -> int:
        return len(self._run_of)

    def add(self, hashes: tuple[int, ...], leaf: Node, end: int, block_tokens: int) -> None:
        """The last of consecutive blocks `hashes` ends at depth `end`, in or above `leaf`."""
        known = self._run_of.get(hashes[-1])
        if (
            known is not None
            and known.hashes == hashes
            and known.block_tokens == block_tokens
            and known.end == end
            and spanning(known.leaf, end) is spanning(leaf, end)
        ):
            return
        run = Run(hashes, leaf, end, block_tokens)
        self._run_of.update(dict.fromkeys(hashes, run))
        self.runs.append(run)
        for _ in range(_LOOKED_AFTER):
            self._look_after(self.runs.popleft())

    def find(self, bit: int, block: int) -> tuple[Node, int] | None:
        """The node in which `block` ends, and the depth; None if worker `bit` does not hold it."""
        run = self._run_of.get(block)
        if run is None:
            return None
        end = run.end_of(block)
        node = run.node_at(bit, end)
        return None if node is None else (node, end)

    def by_run(self, hashes: tuple[int, ...]) -> Iterator[tuple[Run | None, list[int]]]:
        """`hashes`, those of the same run together as long as they are consecutive; None for unknown ones."""
        for run, blocks in groupby(hashes, self._run_of.get):
            yield run, list(blocks)

    def forget(self, run: Run, blocks: list[int]) -> None:
        """Nobody holds these blocks of `run` any more."""
        for block in blocks:
            self._run_of.pop(block, None)
        if tuple(blocks) == run.hashes:
            run.hashes = ()

    def look_after_all(self) -> None:
        """Forgets every block that nobody holds any more."""
        for _ in range(len(self.runs)):
            self._look_after(self.runs.popleft())

    def _look_after(self, run: Run) -> None:
        """Forgets the blocks of `run` that nobody holds any more; they are its last ones."""
        if not run.hashes:
            return
        node = live(run.leaf)
        if node.attached and node.confirmed and self._run_of.get(run.hashes[-1]) is run:
            run.leaf = node
            self.runs.append(run)
            return
        limit = run.end
        while node.parent is not None and not (node.attached and node.confirmed):
            limit = min(limit, node.start)
            node = live(node.parent)
        if node.parent is None:
            limit = 0
        run.leaf = node
        kept = max(0, len(run.hashes) - -(-(run.end - limit) // run.block_tokens))
        for block in run.hashes[kept:]:
            if self._run_of.get(block) is run:
                del self._run_of[block]
        if kept < len(run.hashes):
            run.end = run.end_at(kept - 1) if kept else 0
            run.hashes = run.hashes[:kept]
        if any(self._run_of.get(block) is run for block in run.hashes):
            self.runs.append(run)
