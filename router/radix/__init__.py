"""Which worker holds which prefix: one radix tree over token ids for all workers.

`tree` is what the router uses. Below it: `structure` (how nodes grow, divide and join), `node` (a node, and references
that stay good), `blocks` (where a block hash ends), `masks` (sets of workers).
"""

from router.radix.tree import Hold, Match, RadixTree

__all__ = ["Hold", "Match", "RadixTree"]
