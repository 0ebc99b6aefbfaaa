"""Every invariant of the router's tree, by a walk over all of it."""

import numpy as np

from router.events import TOKEN_BYTES
from router.radix import RadixTree
from router.radix.node import NO_CHILDREN, NO_REFS, Node, Root, upwards


def check(tree: RadixTree) -> None:
    page_bytes, roots = tree._structure.page_bytes, tree._structure.roots
    tokens = 0
    nodes: set[Node] = set()
    held_tokens = dict.fromkeys(tree._workers, 0)
    refs = dict.fromkeys(tree._workers, 0)
    stack: list[Node] = list(roots.values())
    assert all(root.children for root in stack), "an empty namespace is kept"
    while stack:
        node = stack.pop()
        for first, child in node.children.items():
            assert child.attached
            assert child.parent is node
            assert child.start == node.end
            assert first == child.key[:page_bytes]
            assert child.end - child.start == len(child.key) // TOKEN_BYTES > 0
            assert len(child.key) % page_bytes == 0
            assert child.confirmed | child.held, "a node that nobody holds"
            if not isinstance(node, Root):
                assert not child.confirmed & ~node.confirmed, "a confirmed prefix with a hole"
                assert not child.held & ~node.held, "a held prefix with a hole"
            assert child.held == sum(child.refs)
            assert all(count > 0 for count in child.refs.values())
            nodes.add(child)
            tokens += child.end - child.start
            for bit in held_tokens:
                held_tokens[bit] += child.end - child.start if child.confirmed & bit else 0
                refs[bit] += child.refs.get(bit, 0)
            stack.append(child)
    assert (tokens, len(nodes)) == (tree.tokens, tree.nodes)
    listed = tree._structure.evictable.keys()
    assert listed == {node for node in nodes if not node.refs}, "what is not in flight can be evicted"
    assert held_tokens == {bit: holdings.tokens for bit, holdings in tree._holdings.items()}
    assert not NO_CHILDREN
    assert not NO_REFS
    for bit, holdings in tree._holdings.items():
        paths = (upwards(hold.leaf) for hold in holdings.holds if hold.leaf is not None)
        assert refs[bit] == sum(1 for path in paths for _ in path), "references without a request"


def holdings(tree: RadixTree, worker: str) -> set[tuple[str, tuple[int, ...]]]:
    """(namespace, tokens) of every longest prefix that `worker` is confirmed to hold."""
    bit = tree._workers.of[worker]
    found: set[tuple[str, tuple[int, ...]]] = set()
    for namespace, root in tree._structure.roots.items():
        stack: list[tuple[Node, bytes]] = [(root, b"")]
        while stack:
            node, prefix = stack.pop()
            below = [child for child in node.children.values() if child.confirmed & bit]
            stack += [(child, prefix + child.key) for child in below]
            if prefix and not below:
                found.add((namespace, tuple(np.frombuffer(prefix, "<u4").tolist())))
    return found
