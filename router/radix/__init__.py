"""Which worker holds which prefix: one radix tree over token ids for all workers.

`tree` is what the router uses. Below it: `structure` (how nodes grow, divide and join), `node` (a node, references that
stay good, sets of workers), `blocks` (where a block hash ends).
"""

from router.radix.tree import Hold, Match, RadixTree

__all__ = ["Hold", "Match", "RadixTree"]
