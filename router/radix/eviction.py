"""Which node is evicted first, of those that no request in flight refers to.

First those that no event has confirmed, because no replica may have them; then the least recently used. The list
follows the use of nodes, so a parent may come before its children if it was divided since: it is then passed over.
"""

from collections import OrderedDict

from router.radix.node import Node


class EvictionOrder:
    """The nodes that may be evicted, in order. `assumed` is the mask of the workers that send no usable events."""

    def __init__(self) -> None:
        self.assumed = 0
        self.guessed: OrderedDict[Node, None] = OrderedDict()
        """Those that no event has confirmed, the least recently used first."""
        self.confirmed: OrderedDict[Node, None] = OrderedDict()

    def __contains__(self, node: Node) -> bool:
        return node in self.guessed or node in self.confirmed

    def add(self, node: Node) -> None:
        """`node` was used just now. Its kind may have changed."""
        if node.confirmed & ~self.assumed:
            listed, other = self.confirmed, self.guessed
        else:
            listed, other = self.guessed, self.confirmed
        other.pop(node, None)
        listed[node] = None
        listed.move_to_end(node)

    def discard(self, node: Node) -> None:
        """`node` is in use, or gone."""
        self.guessed.pop(node, None)
        self.confirmed.pop(node, None)

    def unconfirm(self, node: Node) -> None:
        """A worker does not hold `node` any more: without another's event it is only a guess."""
        if node in self.confirmed and not node.confirmed & ~self.assumed:
            self.add(node)

    def next_leaf(self) -> Node | None:
        """The leaf to evict next; None if all that is left is in use."""
        while listed := self.guessed or self.confirmed:
            node = next(iter(listed))
            if not node.children:
                return node
            listed.move_to_end(node)  # divided since it was used
        return None
