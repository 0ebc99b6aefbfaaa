"""The nodes of all namespaces: how they grow, divide, join and are pruned.

All boundaries lie on whole pages. A node that nobody holds does not exist. Two nodes are joined where a change was
just made next to them and both have the same holders: a few comparisons, and one copy of their tokens.

Nothing costs Python time per token: comparisons are `memcmp` on bytes, and only the one node in which a prompt leaves
the tree is compared by numpy, in pieces that grow.
"""

from collections import OrderedDict

import numpy as np

from router.events import TOKEN_BYTES
from router.radix.node import Node, Root, live

_FIRST_PIECE = 1024
"""Tokens that are compared first where a prompt leaves a node."""


class Structure:
    """The nodes, and their number and tokens."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.page_bytes = page_size * TOKEN_BYTES
        self.tokens = 0
        self.nodes = 0
        self.roots: dict[str, Root] = {}
        self.evictable: OrderedDict[Node, None] = OrderedDict()
        """The nodes that no request in flight refers to, the least recently used first."""

    def root(self, namespace: str) -> Root:
        """The root of `namespace`, made if missing."""
        root = self.roots.get(namespace)
        if root is None:
            root = self.roots[namespace] = Root(namespace)
        return root

    def common_bytes(self, key: bytes, tokens: bytes, at: int) -> int:
        """How many bytes, in whole pages, `key` and `tokens` from `at` on have in common."""
        count = min(len(key), len(tokens) - at) // TOKEN_BYTES
        ours, theirs = np.frombuffer(key, "<u4", count), np.frombuffer(tokens, "<u4", count, at)
        start, piece = 0, _FIRST_PIECE
        while start < count:
            differs = ours[start : start + piece] != theirs[start : start + piece]
            first = int(differs.argmax())
            if differs[first]:
                count = start + first
                break
            start += piece
            piece *= 4
        return (count - count % self.page_size) * TOKEN_BYTES

    def claim(self, anchor: Node, depth: int, tokens: bytes, usable: int) -> Node:
        """The node that ends exactly `usable` bytes of `tokens` below `depth` in `anchor`; made where missing."""
        node = anchor if depth == anchor.end else self.split(anchor, depth)
        part: Node | None = None
        at = 0
        while (child := node.children.get(tokens[at : at + self.page_bytes])) is not None:
            if tokens.startswith(child.key, at):
                at += len(child.key)
                node = child
            else:
                at += self.common_bytes(child.key, tokens, at)
                part = child
                break
        return self.grow(node, part, depth + at // TOKEN_BYTES, tokens, usable, depth)

    def grow(
        self, node: Node, part: Node | None, depth: int, tokens: bytes, usable: int, start: int = 0
    ) -> Node:
        """The node that ends `usable` bytes of `tokens` below depth `start`.

        All up to `depth` exists already: whole nodes down to `node`, and the head of `part`.
        """
        if part is not None:
            node = self.split(part, depth)
        at = (depth - start) * TOKEN_BYTES
        return node if at == usable else self._attach(node, tokens[at:usable])

    def split(self, node: Node, depth: int) -> Node:
        """Divides `node` at `depth`, which is inside it. Returns the new upper part; `node` is the lower."""
        parent = node.parent
        assert parent is not None
        assert node.start < depth < node.end
        cut = (depth - node.start) * TOKEN_BYTES
        upper = Node(node.key[:cut], node.start, depth, parent)
        upper.confirmed, upper.held = node.confirmed, node.held
        if node.refs:
            upper.refs = dict(node.refs)
        parent.children[node.key[: self.page_bytes]] = upper
        node.key = node.key[cut:]
        node.start = depth
        node.parent = upper
        upper.children = {node.key[: self.page_bytes]: node}
        self.nodes += 1
        if not upper.refs:
            self.used(upper)
        return upper

    def used(self, node: Node) -> None:
        """`node`, to which no request refers, was used just now."""
        self.evictable[node] = None
        self.evictable.move_to_end(node)

    def next_leaf(self) -> Node | None:
        """The leaf that was not used for longest; None if all that is left is in use."""
        while self.evictable:
            node = next(iter(self.evictable))
            if not node.children:
                return node
            self.evictable.move_to_end(node)  # divided since it was used
        return None

    def tidy(self, node: Node) -> None:
        """Removes a node without holders, and joins one to its only child if their holders are the same."""
        if not node.attached or node.parent is None:
            return
        if not node.confirmed and not node.refs:
            self._detach(node)
        elif len(node.children) == 1:
            (child,) = node.children.values()
            if child.confirmed == node.confirmed and child.refs == node.refs:
                self._join(node, child)

    def tidy_upwards(self, node: Node) -> None:
        """Tidies `node` and those above it, and the root if it has become empty."""
        while (parent := node.parent) is not None:
            if len(node.children) < 2:
                self.tidy(node)
            node = parent if parent.alias is None else live(parent)
        if not node.children and isinstance(node, Root):
            self.roots.pop(node.namespace, None)

    def _attach(self, parent: Node, key: bytes) -> Node:
        length = len(key) // TOKEN_BYTES
        node = Node(key, parent.end, parent.end + length, parent)
        parent.add_child(key[: self.page_bytes], node)
        self.nodes += 1
        self.tokens += length
        return node

    def _detach(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None
        assert not node.children
        parent.remove_child(node.key[: self.page_bytes])
        self.evictable.pop(node, None)
        self.nodes -= 1
        self.tokens -= node.end - node.start
        node.leave()

    def _join(self, node: Node, child: Node) -> None:
        """Makes `node` the head of its only child, whose holders are the same."""
        parent = node.parent
        assert parent is not None
        parent.children[node.key[: self.page_bytes]] = child
        child.key = node.key + child.key
        child.start = node.start
        child.parent = parent
        self.evictable.pop(node, None)
        node.leave(alias=child)
        self.nodes -= 1
