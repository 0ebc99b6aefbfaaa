"""A node of the radix tree, references into the tree that stay good while nodes divide and join, and sets of workers.

A node's end never changes: when a node divides, the old object stays the lower part; when it joins its only child,
the child's object stays. So a reference (node, depth) finds the node that spans its depth by walking up.
"""

from collections.abc import Iterator

_MAX_SETS = 4_000
"""Sets whose names are kept ready; beyond, all are forgotten."""

NO_CHILDREN: "dict[bytes, Node]" = {}
NO_REFS: dict[int, int] = {}
"""Shared by all nodes that have none. Never written to."""


class Node:
    """A run of tokens, from depth `start` to depth `end` of every prompt that passes through it."""

    __slots__ = (
        "alias",
        "attached",
        "children",
        "confirmed",
        "end",
        "held",
        "key",
        "parent",
        "refs",
        "start",
    )

    def __init__(self, key: bytes, start: int, end: int, parent: "Node | None") -> None:
        self.key = key
        self.start = start
        self.end = end
        self.parent = parent
        self.children: dict[bytes, Node] = NO_CHILDREN
        """By their first page."""
        self.confirmed = 0
        """Bit mask of the workers that are confirmed to hold it."""
        self.held = 0
        """Bit mask of the workers in `refs`."""
        self.refs: dict[int, int] = NO_REFS
        """Worker bit -> requests in flight there whose prompt passes through this node."""
        self.attached = True
        """False once it has left the tree."""
        self.alias: Node | None = None
        """The node that this one has been joined to."""

    def add_child(self, first_page: bytes, child: "Node") -> None:
        if not self.children:
            self.children = {}
        self.children[first_page] = child

    def remove_child(self, first_page: bytes) -> None:
        del self.children[first_page]
        if not self.children:
            self.children = NO_CHILDREN

    def leave(self, alias: "Node | None" = None) -> None:
        """The node is not part of the tree any more; `alias` is the one that it has been joined to."""
        self.key = b""
        self.children = NO_CHILDREN
        self.attached = False
        self.alias = alias


class Root(Node):
    """Depth 0 of one namespace. It has no tokens and no holders, and is not counted as a node."""

    __slots__ = ("namespace",)

    def __init__(self, namespace: str) -> None:
        super().__init__(b"", 0, 0, None)
        self.namespace = namespace


def live(node: Node) -> Node:
    """What `node` has become by joining."""
    found = node
    while found.alias is not None:
        found = found.alias
    if found is not node:
        node.alias = found
    return found


def spanning(node: Node, depth: int) -> Node:
    """The node with start < depth <= end on the way from `node` up to the root."""
    while True:
        if node.alias is not None:
            node = live(node)
        if depth > node.start:
            return node
        assert node.parent is not None
        node = node.parent


def upwards(node: Node) -> Iterator[Node]:
    """`node` and those above it, without the root."""
    while node.parent is not None:
        yield node
        node = node.parent


class WorkerBits:
    """Each worker has one bit; the bit of a worker that is gone is used again."""

    def __init__(self) -> None:
        self.of: dict[str, int] = {}
        """Worker -> bit."""
        self._names: dict[int, str] = {}
        self._sets: dict[int, dict[str, None]] = {}

    def __iter__(self) -> Iterator[int]:
        return iter(self._names)

    def add(self, worker: str) -> int:
        assert worker not in self.of, worker
        bit = 1
        while bit in self._names:
            bit <<= 1
        self.of[worker] = bit
        self._names[bit] = worker
        self._sets.clear()
        return bit

    def remove(self, worker: str) -> None:
        """`worker` is gone. Its bit must not be set anywhere any more."""
        del self._names[self.of.pop(worker)]
        self._sets.clear()

    def names(self, mask: int) -> dict[str, None]:
        """The workers of a mask, in the order of their bits. Not to be changed."""
        names = self._sets.get(mask)
        if names is None:
            if len(self._sets) >= _MAX_SETS:
                self._sets.clear()
            names = self._sets[mask] = dict.fromkeys(self._names[bit] for bit in bits(mask))
        return names


def bits(mask: int) -> Iterator[int]:
    """The bits that are set in `mask`, lowest first."""
    while mask:
        bit = mask & -mask
        yield bit
        mask ^= bit
