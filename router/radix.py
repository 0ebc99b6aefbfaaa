"""Which worker holds which prefix: one radix tree over token ids for all workers, a worker being a bit.

A node is a run of tokens that all who hold any of it hold together. Two kinds of holding are kept apart:

* *confirmed*: the worker's own KV events said so. Blocks come as a chain of hashes, so per worker there is a
  map from hash to (node, depth). A worker without events never confirms; what it has served is taken as
  confirmed until it is evicted here.
* *held*: a request in flight was sent there with this prompt, so the prefix is or soon will be there. Counted
  per request, and gone with the request, so that what no event confirms disappears by itself.

What a worker holds is contiguous from the root, so a node's holders are among its parent's; a node that
nobody holds does not exist. All boundaries lie on whole pages, because replicas cache whole pages only.

Nodes divide and join, and references into them stay good: a node's end never changes, when it divides the old
object stays the lower part, when it joins its only child the child's object stays. So a reference
(node, depth) finds the node that spans its depth by walking up. Two nodes are joined where a change was just
made next to them and both have the same holders: a few comparisons, and one copy of their tokens.

Comparisons are `memcmp` on bytes; only the one node in which a prompt leaves the tree is compared token by
token, by numpy. Nothing here costs Python time per token.
"""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from router.events import TOKEN_BYTES

_MAP_SLACK = 1024
"""Stale entries that a map or heap may hold beyond as many as it holds live ones, before it is swept."""


@dataclass(frozen=True, slots=True)
class Match:
    """How much of one prompt each worker holds, in tokens, always whole pages.

    `lengths` names the workers that hold any; `holders`, in a fixed order, those that hold the longest match,
    which is of `tokens` tokens. `branches` are the depths, up to `tokens`, at which other prompts left it.
    """

    tokens: int = 0
    holders: tuple[str, ...] = ()
    lengths: dict[str, int] = field(default_factory=dict)
    branches: tuple[int, ...] = ()

    def of(self, worker: str) -> int:
        """Tokens of the prompt that `worker` holds."""
        return self.lengths.get(worker, 0)


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
        "queued",
        "refs",
        "start",
        "used",
    )

    def __init__(self, key: bytes, start: int, end: int, parent: "Node | None") -> None:
        self.key = key
        self.start = start
        self.end = end
        self.parent = parent
        self.children: dict[bytes, Node] = {}
        """By their first page."""
        self.confirmed = 0
        """Bit mask of workers."""
        self.held = 0
        """Bit mask of the workers in `refs`."""
        self.refs: dict[int, int] = {}
        """Worker bit -> requests in flight there whose prompt passes through this node."""
        self.used = 0
        """When a request or an event last came by, in ticks of the tree."""
        self.queued: tuple[bool, int] | None = None
        """The rank under which the node waits for eviction."""
        self.attached = True
        self.alias: Node | None = None
        """The node that this one has been joined to."""


class _Root(Node):
    """Depth 0 of one namespace. Not counted as a node."""

    __slots__ = ("namespace",)

    def __init__(self, namespace: str) -> None:
        super().__init__(b"", 0, 0, None)
        self.namespace = namespace


class Hold:
    """One request in flight holds its prompt's prefix at one worker. Releasing it again is harmless."""

    __slots__ = ("bit", "leaf")

    def __init__(self, bit: int, leaf: Node | None) -> None:
        self.bit = bit
        self.leaf = leaf


class RadixTree:
    """The tree of all namespaces (a namespace: model, adapter, cache salt) and all workers.

    Memory is bounded by `max_tree_tokens` and the prompts in flight together: beyond, leaves are evicted that
    no request in flight refers to, first those that no event has confirmed, then the least recently used.
    """

    def __init__(self, page_size: int = 16, max_tree_tokens: int = 8_000_000) -> None:
        if page_size < 1:
            raise ValueError(f"page_size is {page_size}: a page has at least one token")
        if max_tree_tokens < page_size:
            raise ValueError(f"max_tree_tokens is {max_tree_tokens}: not even one page of {page_size}")
        self.page_size = page_size
        self.max_tree_tokens = max_tree_tokens
        self.tokens = 0
        self.nodes = 0
        self.unknown_parents = 0
        self.unknown_removes = 0
        self.misfits = 0
        self.evicted_tokens = 0
        self._page_bytes = page_size * TOKEN_BYTES
        self._roots: dict[str, _Root] = {}
        self._bits: dict[str, int] = {}
        self._names: dict[int, str] = {}
        self._assumed = 0
        self._holds: dict[int, set[Hold]] = {}
        self._held_tokens: dict[int, int] = {}
        self._blocks: dict[int, dict[int, tuple[Node, int]]] = {}
        self._block_tokens: dict[int, int] = {}
        self._sweep_at: dict[int, int] = {}
        self._heap: list[tuple[bool, int, int, Node]] = []
        self._tick = 0
        self._pushes = 0

    # -- workers

    def add_worker(self, worker: str, has_events: bool = True) -> None:
        """From here on `worker` can hold prefixes. Without events it is taken to keep what it has served."""
        assert worker not in self._bits, worker
        bit = 1
        while bit in self._names:
            bit <<= 1
        self._bits[worker] = bit
        self._names[bit] = worker
        if not has_events:
            self._assumed |= bit
        self._holds[bit] = set()
        self._held_tokens[bit] = 0
        self._blocks[bit] = {}
        self._block_tokens[bit] = self.page_size
        self._sweep_at[bit] = _MAP_SLACK

    def remove_worker(self, worker: str) -> None:
        """`worker` is gone: it holds nothing, and what was in flight there holds nothing."""
        bit = self._bits[worker]
        for hold in list(self._holds[bit]):
            self.release(hold, served=False)
        self.clear(worker)
        del self._bits[worker], self._names[bit]
        del self._holds[bit], self._held_tokens[bit]
        del self._blocks[bit], self._block_tokens[bit], self._sweep_at[bit]
        self._assumed &= ~bit

    def worker_tokens(self, worker: str) -> int:
        """Tokens that `worker` is confirmed (or, without events, assumed) to hold."""
        return self._held_tokens[self._bits[worker]]

    # -- requests

    def match(self, tokens: bytes, namespace: str = "") -> Match:
        """How much of the prompt each worker holds, confirmed or in flight. Changes nothing."""
        root = self._roots.get(namespace)
        if root is None:
            return Match()
        node: Node = root
        steps: list[tuple[int, int]] = []
        branches: list[int] = []
        page_bytes = self._page_bytes
        at = 0
        while (child := node.children.get(tokens[at : at + page_bytes])) is not None:
            if not tokens.startswith(child.key, at):
                at += self._common_bytes(child.key, tokens, at)
                steps.append((child.confirmed | child.held, at // TOKEN_BYTES))
                break
            at += len(child.key)
            steps.append((child.confirmed | child.held, child.end))
            if len(child.children) > 1:
                branches.append(child.end)
            node = child
        if not steps:
            return Match()
        lengths: dict[str, int] = {}
        seen = 0
        for mask, depth in reversed(steps):
            for bit in _bits(mask & ~seen):
                lengths[self._names[bit]] = depth
            seen |= mask
        longest, depth = steps[-1]
        return Match(depth, tuple(self._names[bit] for bit in _bits(longest)), lengths, tuple(branches))

    def hold(self, worker: str, tokens: bytes, namespace: str = "") -> Hold:
        """`worker` holds the whole pages of this prompt until the `Hold` is released."""
        bit = self._bits[worker]
        usable = len(tokens) - len(tokens) % self._page_bytes
        if not usable:
            return Hold(bit, None)
        self._tick += 1
        path = self._claim(self._root(namespace), 0, tokens[:usable])
        for node in path:
            node.refs[bit] = node.refs.get(bit, 0) + 1
            node.held |= bit
            node.used = self._tick
        hold = Hold(bit, path[-1])
        self._holds[bit].add(hold)
        self._shrink()
        return hold

    def release(self, hold: Hold, served: bool = True) -> None:
        """The request is over. `served`: the worker has computed its prompt; without events it keeps it."""
        leaf, hold.leaf = hold.leaf, None
        if leaf is None:
            return
        bit = hold.bit
        self._holds[bit].discard(hold)
        keeps = served and bool(bit & self._assumed)
        for node in _upwards(leaf):
            count = node.refs[bit] - 1
            if count:
                node.refs[bit] = count
            else:
                del node.refs[bit]
                node.held &= ~bit
            if keeps:
                self._confirm(node, bit)
        self._tidy_upwards(leaf)
        self._shrink()

    def is_confirmed(self, hold: Hold) -> bool:
        """The worker's own events say that it has all that `hold` stands for."""
        return hold.leaf is None or bool(_live(hold.leaf).confirmed & hold.bit)

    # -- KV events

    def stored(
        self,
        worker: str,
        hashes: tuple[int, ...],
        parent: int | None,
        tokens: bytes,
        block_tokens: int,
        namespace: str = "",
    ) -> None:
        """`worker` confirms `len(hashes)` blocks below block `parent`, or at the start of a prompt when None.

        Counted and ignored: an unknown parent; a block size that is no whole number of our pages, or tokens
        that do not fill the blocks.
        """
        bit = self._bits[worker]
        if block_tokens % self.page_size or len(tokens) != len(hashes) * block_tokens * TOKEN_BYTES:
            self.misfits += 1
            return
        if not hashes:
            return
        above = (
            (self._root(namespace), 0) if parent is None else self._find(bit, self._blocks[bit].get(parent))
        )
        if above is None:
            self.unknown_parents += 1
            return
        anchor, depth = above
        self._tick += 1
        path = self._claim(anchor, depth, tokens)
        for node in path:
            self._confirm(node, bit)
            node.used = self._tick
        leaf = path[-1]
        self._tidy_upwards(leaf)
        self._block_tokens[bit] = block_tokens
        blocks = self._blocks[bit]
        node, end = leaf, leaf.end
        for block in reversed(hashes):
            node = _spanning(node, end)
            blocks[block] = (node, end)
            end -= block_tokens
        self._shrink()
        self._sweep_blocks(bit)

    def removed(self, worker: str, hashes: tuple[int, ...]) -> None:
        """`worker` has dropped these blocks, and all that it held below them. Unknown ones are counted."""
        bit = self._bits[worker]
        blocks = self._blocks[bit]
        entries = [blocks.pop(block, None) for block in hashes]
        known = sorted((entry for entry in entries if entry is not None), key=lambda entry: entry[1])
        self.unknown_removes += len(entries) - len(known)
        for entry in known:  # the shallowest first: it clears the deeper ones with it
            found = self._find(bit, entry)
            if found is not None:
                node, end = found
                self._clear_block(node, end - self._block_tokens[bit], bit)

    def clear(self, worker: str) -> None:
        """`worker` caches nothing any more; what is in flight there stays held."""
        bit = self._bits[worker]
        for root in list(self._roots.values()):
            for child in list(root.children.values()):
                if child.confirmed & bit:
                    self._clear_below(child, bit)
        self._blocks[bit].clear()

    # -- looking in

    def holdings(self, worker: str) -> set[tuple[str, tuple[int, ...]]]:
        """(namespace, tokens) of every longest prefix that `worker` is confirmed to hold."""
        bit = self._bits[worker]
        found: set[tuple[str, tuple[int, ...]]] = set()
        for namespace, root in self._roots.items():
            stack: list[tuple[Node, bytes]] = [(root, b"")]
            while stack:
                node, prefix = stack.pop()
                below = [child for child in node.children.values() if child.confirmed & bit]
                stack += [(child, prefix + child.key) for child in below]
                if prefix and not below:
                    found.add((namespace, tuple(np.frombuffer(prefix, "<u4").tolist())))
        return found

    def counters(self) -> dict[str, int]:
        """Sizes and tallies, for a snapshot."""
        return {
            "tokens": self.tokens,
            "max_tokens": self.max_tree_tokens,
            "nodes": self.nodes,
            "namespaces": len(self._roots),
            "blocks": sum(map(len, self._blocks.values())),
            "unknown_parents": self.unknown_parents,
            "unknown_removes": self.unknown_removes,
            "misfits": self.misfits,
            "evicted_tokens": self.evicted_tokens,
        }

    def check(self) -> None:
        """Asserts every invariant that the module's docstring states. Costs a walk over the tree."""
        tokens = nodes = 0
        held_tokens = dict.fromkeys(self._names, 0)
        refs: dict[int, int] = dict.fromkeys(self._names, 0)
        stack: list[Node] = list(self._roots.values())
        assert all(root.children for root in stack), "an empty namespace is kept"
        while stack:
            node = stack.pop()
            for first, child in node.children.items():
                assert child.attached
                assert child.parent is node
                assert child.start == node.end
                assert first == child.key[: self._page_bytes]
                assert child.end - child.start == len(child.key) // TOKEN_BYTES > 0
                assert len(child.key) % self._page_bytes == 0
                assert child.confirmed | child.held, "a node that nobody holds"
                if node.parent is not None:
                    assert not child.confirmed & ~node.confirmed, "a confirmed prefix with a hole"
                    assert not child.held & ~node.held, "a held prefix with a hole"
                assert child.held == sum(child.refs)
                assert all(count > 0 for count in child.refs.values())
                assert child.children or child.refs or child.queued is not None, (
                    "a leaf that is never evicted"
                )
                nodes += 1
                tokens += child.end - child.start
                for bit in held_tokens:
                    held_tokens[bit] += child.end - child.start if child.confirmed & bit else 0
                    refs[bit] += child.refs.get(bit, 0)
                stack.append(child)
        assert (tokens, nodes) == (self.tokens, self.nodes)
        assert held_tokens == self._held_tokens
        for bit, holds in self._holds.items():
            paths = (_upwards(hold.leaf) for hold in holds if hold.leaf is not None)
            assert refs[bit] == sum(1 for path in paths for _ in path), "references without a request"

    # -- the mechanism

    def _root(self, namespace: str) -> _Root:
        root = self._roots.get(namespace)
        if root is None:
            root = self._roots[namespace] = _Root(namespace)
        return root

    def _common_bytes(self, key: bytes, tokens: bytes, at: int) -> int:
        """Bytes in whole pages that `key` and `tokens` from `at` on have in common."""
        count = min(len(key), len(tokens) - at) // TOKEN_BYTES
        differs = np.frombuffer(key, "<u4", count) != np.frombuffer(tokens, "<u4", count, at)
        first = int(differs.argmax()) if count else 0
        common = first if count and differs[first] else count
        return (common - common % self.page_size) * TOKEN_BYTES

    def _claim(self, anchor: Node, depth: int, tokens: bytes) -> list[Node]:
        """The nodes, top down, that are exactly `tokens` below `depth` in `anchor`; made where missing."""
        node = anchor if depth == anchor.end else self._split(anchor, depth)
        path: list[Node] = []
        at = 0
        while at < len(tokens):
            child = node.children.get(tokens[at : at + self._page_bytes])
            if child is None:
                child = self._attach(node, tokens[at:])
                at = len(tokens)
            elif tokens.startswith(child.key, at):
                at += len(child.key)
            else:
                common = self._common_bytes(child.key, tokens, at)
                child = self._split(child, child.start + common // TOKEN_BYTES)
                at += common
            path.append(child)
            node = child
        return path

    def _attach(self, parent: Node, key: bytes) -> Node:
        length = len(key) // TOKEN_BYTES
        node = Node(key, parent.end, parent.end + length, parent)
        parent.children[key[: self._page_bytes]] = node
        self.nodes += 1
        self.tokens += length
        return node

    def _detach(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None
        assert not node.children
        del parent.children[node.key[: self._page_bytes]]
        self.nodes -= 1
        self.tokens -= node.end - node.start
        node.attached = False
        node.key = b""

    def _split(self, node: Node, depth: int) -> Node:
        """Divides `node` at `depth`, which is inside it. Returns the new upper part; `node` is the lower."""
        parent = node.parent
        assert parent is not None
        assert node.start < depth < node.end
        cut = (depth - node.start) * TOKEN_BYTES
        upper = Node(node.key[:cut], node.start, depth, parent)
        upper.confirmed, upper.held, upper.refs = node.confirmed, node.held, dict(node.refs)
        upper.used = node.used
        parent.children[node.key[: self._page_bytes]] = upper
        node.key = node.key[cut:]
        node.start = depth
        node.parent = upper
        upper.children[node.key[: self._page_bytes]] = node
        self.nodes += 1
        return upper

    def _join(self, node: Node, child: Node) -> None:
        """Makes `node` the head of its only child, whose holders are the same."""
        parent = node.parent
        assert parent is not None
        parent.children[node.key[: self._page_bytes]] = child
        child.key = node.key + child.key
        child.start = node.start
        child.parent = parent
        child.used = max(child.used, node.used)
        node.key = b""
        node.children = {}
        node.attached = False
        node.alias = child
        self.nodes -= 1

    def _confirm(self, node: Node, bit: int) -> None:
        if not node.confirmed & bit:
            node.confirmed |= bit
            self._held_tokens[bit] += node.end - node.start

    def _unconfirm(self, node: Node, bit: int) -> None:
        if node.confirmed & bit:
            node.confirmed &= ~bit
            self._held_tokens[bit] -= node.end - node.start

    def _find(self, bit: int, entry: tuple[Node, int] | None) -> tuple[Node, int] | None:
        """The node that spans the entry's depth, and the depth; None when `bit` does not hold it any more."""
        if entry is None:
            return None
        node = _spanning(*entry)
        return (node, entry[1]) if node.attached and node.confirmed & bit else None

    def _clear_block(self, node: Node, start: int, bit: int) -> None:
        """`bit` does not hold the block from `start` that ends in `node`, nor anything below.

        A block longer than a page may have its head in nodes above, which other blocks can share: those stay
        where another child has the bit.
        """
        while node.start > start:
            above = node.parent
            assert above is not None
            if any(child is not node and child.confirmed & bit for child in above.children.values()):
                break
            node = above
        if node.start < start:
            self._split(node, start)
        self._clear_below(node, bit)

    def _clear_below(self, top: Node, bit: int) -> None:
        """`bit` holds neither `top` nor anything below."""
        order = [top]
        for node in order:
            order += [child for child in node.children.values() if child.confirmed & bit]
        for node in reversed(order):
            self._unconfirm(node, bit)
            self._tidy(node)
        self._tidy_upwards(top)

    def _tidy(self, node: Node) -> None:
        """Prunes a node without holders, joins one to its only child where their holders are the same."""
        if not node.attached or node.parent is None:
            return
        if not node.confirmed and not node.refs:
            self._detach(node)
        elif len(node.children) == 1:
            (child,) = node.children.values()
            if child.confirmed == node.confirmed and child.refs == node.refs:
                self._join(node, child)
        elif not node.children and not node.refs:
            self._queue(node)

    def _tidy_upwards(self, node: Node) -> None:
        while (parent := node.parent) is not None:
            self._tidy(node)
            node = _live(parent)
        if not node.children and isinstance(node, _Root):
            self._roots.pop(node.namespace, None)

    # -- eviction

    def _rank(self, node: Node) -> tuple[bool, int]:
        """Lower goes first: not confirmed by any event, then least recently used."""
        return bool(node.confirmed & ~self._assumed), node.used

    def _queue(self, node: Node) -> None:
        rank = self._rank(node)
        if node.queued is None or rank < node.queued:
            node.queued = rank
            self._pushes += 1
            heapq.heappush(self._heap, (*rank, self._pushes, node))
            if len(self._heap) > 2 * self.nodes + _MAP_SLACK:
                self._heap = [
                    entry for entry in self._heap if entry[3].attached and entry[3].queued == entry[:2]
                ]
                heapq.heapify(self._heap)

    def _shrink(self) -> None:
        """Evicts leaves until the tree is small enough, or all that is left is in use."""
        while self.tokens > self.max_tree_tokens and self._heap:
            confirmed, used, _, node = heapq.heappop(self._heap)
            if node.queued != (confirmed, used):
                continue
            node.queued = None
            if not node.attached or node.children or node.refs:
                continue
            if self._rank(node) > (confirmed, used):
                self._queue(node)
                continue
            self._evict(node)

    def _evict(self, leaf: Node) -> None:
        """Nobody holds `leaf` any more, nor the head of a block whose rest it was."""
        self.evicted_tokens += leaf.end - leaf.start
        above = leaf.parent
        assert above is not None
        holders = leaf.confirmed
        for bit in _bits(holders):
            self._unconfirm(leaf, bit)
        self._tidy_upwards(leaf)
        for bit in _bits(holders):
            node = _live(above)
            head = leaf.start - leaf.start % self._block_tokens[bit]
            shared = node.end > leaf.start or any(child.confirmed & bit for child in node.children.values())
            if head < leaf.start and not shared and node.confirmed & bit:
                self._clear_block(node, head, bit)

    def _sweep_blocks(self, bit: int) -> None:
        """Drops the entries of blocks that are not held any more, each time the map has doubled."""
        blocks = self._blocks[bit]
        if len(blocks) > self._sweep_at[bit]:
            found = ((block, self._find(bit, entry)) for block, entry in blocks.items())
            self._blocks[bit] = {block: entry for block, entry in found if entry is not None}
            self._sweep_at[bit] = 2 * len(self._blocks[bit]) + _MAP_SLACK


def _bits(mask: int) -> Iterator[int]:
    """The bits that are set in `mask`, lowest first."""
    while mask:
        bit = mask & -mask
        yield bit
        mask ^= bit


def _live(node: Node) -> Node:
    """What has become of `node` where nodes were joined."""
    while node.alias is not None:
        node = node.alias
    return node


def _spanning(node: Node, depth: int) -> Node:
    """The node with start < depth <= end on the way from `node` up to the root."""
    node = _live(node)
    while depth <= node.start:
        assert node.parent is not None
        node = _live(node.parent)
    return node


def _upwards(node: Node) -> Iterator[Node]:
    """`node` and those above it, the root left out."""
    while node.parent is not None:
        yield node
        node = node.parent
