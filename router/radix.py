"""Which worker holds which prefix: one radix tree over token ids for all workers, a worker being a bit.

A node is a run of tokens that all who hold any of it hold together. Two kinds of holding are kept apart:

* *confirmed*: the worker's own KV events said so. Blocks come as a chain of hashes, each of which stands for
  all tokens up to its block, so one map from hash to place serves all workers. A worker without events, or
  with blocks that are no whole number of pages, never confirms; what it has served is taken as confirmed until
  it is evicted here.
* *held*: a request in flight was sent there with this prompt, so the prefix is or soon will be there. Counted
  per request, and gone with the request, so that what no event confirms disappears by itself.

What a worker holds is contiguous from the root, so a node's holders are among its parent's; a node that
nobody holds does not exist. All boundaries lie on whole pages, because replicas cache whole pages only.

Nodes divide and join, and references into them stay good: a node's end never changes, when it divides the old
object stays the lower part, when it joins its only child the child's object stays. So a reference
(node, depth) finds the node that spans its depth by walking up. Two nodes are joined where a change was just
made next to them and both have the same holders: a few comparisons, and one copy of their tokens.

Nothing costs Python time per token: comparisons are `memcmp` on bytes, and only the one node in which a prompt
leaves the tree is compared by numpy, in pieces that grow. Nothing is ever swept at once: eviction takes leaves
from the front of a list that is in order of use, and each event looks after two runs of hashes that came
before it, so the map holds at most about twice as many as there are blocks.
"""

from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np

from router.events import TOKEN_BYTES

_RUNS_PER_EVENT = 2
"""Older runs of hashes that are looked after when a new one comes."""

_FIRST_PIECE = 1024
"""Tokens that are compared first where a prompt leaves a node."""

_MAX_HOLDER_SETS = 10_000
"""Sets of workers whose names are kept ready; beyond, all are forgotten."""


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
    end: "tuple[Node, Node | None] | None" = field(default=None, compare=False, repr=False)
    """For the tree: the last node that is matched whole, and the one below it that is matched in part."""

    def of(self, worker: str) -> int:
        """Tokens of the prompt that `worker` holds."""
        return self.lengths.get(worker, 0)


_NO_CHILDREN: "dict[bytes, Node]" = {}
_NO_REFS: dict[int, int] = {}
"""Shared by all nodes that have none, and never changed."""


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
        self.children: dict[bytes, Node] = _NO_CHILDREN
        """By their first page."""
        self.confirmed = 0
        """Bit mask of workers."""
        self.held = 0
        """Bit mask of the workers in `refs`."""
        self.refs: dict[int, int] = _NO_REFS
        """Worker bit -> requests in flight there whose prompt passes through this node."""
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


class _Run:
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

    def end_at(self, index: int) -> int:
        return self.end - (len(self.hashes) - 1 - index) * self.block_tokens


class RadixTree:
    """The tree of all workers and namespaces (adapter, cache salt, extra key; the workers of a router serve one model).

    Memory is bounded by `max_tree_tokens` and the prompts in flight together: beyond, leaves are evicted that
    no request in flight refers to, first those that no event has confirmed, then the least recently used. That
    is done when a request ends and when an event comes, not while one waits for its placement. What one request
    adds to the tree is bounded by `max_hold_tokens`, so that a long prompt does not push out what others cached.
    """

    def __init__(
        self, page_size: int = 16, max_tree_tokens: int = 8_000_000, max_hold_tokens: int | None = None
    ) -> None:
        if page_size < 1:
            raise ValueError(f"page_size is {page_size}: a page has at least one token")
        if max_tree_tokens < page_size:
            raise ValueError(f"max_tree_tokens is {max_tree_tokens}: not even one page of {page_size}")
        self.page_size = page_size
        self.max_tree_tokens = max_tree_tokens
        self._max_hold_tokens = max_hold_tokens
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
        self._lingering: dict[Node, list[Hold]] = {}
        self._held_tokens: dict[int, int] = {}
        self._block_tokens: dict[int, int] = {}
        self._blocks: dict[int, _Run] = {}
        self._runs: deque[_Run] = deque()
        self._holder_sets: dict[int, tuple[str, ...]] = {}
        # All nodes that no request in flight refers to, the least recently used first, children before parents.
        self._guessed: OrderedDict[Node, None] = OrderedDict()
        """Those that no event has confirmed."""
        self._confirmed: OrderedDict[Node, None] = OrderedDict()

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
        self._block_tokens[bit] = self.page_size
        self._holder_sets.clear()

    def remove_worker(self, worker: str) -> None:
        """`worker` is gone: it holds nothing, and what was in flight there holds nothing."""
        bit = self._bits[worker]
        for hold in list(self._holds[bit]):
            self.release(hold, served=False)
        self.clear(worker)
        del self._bits[worker], self._names[bit]
        del self._holds[bit], self._held_tokens[bit], self._block_tokens[bit]
        self._assumed &= ~bit
        self._holder_sets.clear()

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
        part: Node | None = None
        steps: list[tuple[int, int]] = []
        branches: list[int] = []
        page_bytes = self._page_bytes
        at = depth = holders = 0
        while (child := node.children.get(tokens[at : at + page_bytes])) is not None:
            if (mask := child.confirmed | child.held) != holders:
                steps.append((holders, depth))
                holders = mask
            if not tokens.startswith(child.key, at):
                at += self._common_bytes(child.key, tokens, at)
                depth = at // TOKEN_BYTES
                part = child
                break
            depth = child.end
            at = depth * TOKEN_BYTES
            if len(child.children) > 1:
                branches.append(depth)
            node = child
        if not depth:
            return Match(end=(root, None))
        longest = self._names_of(holders)
        lengths = dict.fromkeys(longest, depth)
        for mask, shorter in reversed(steps):
            if mask & ~holders:
                lengths.update(dict.fromkeys(self._names_of(mask & ~holders), shorter))
                holders |= mask
        return Match(depth, longest, lengths, tuple(branches), (node, part))

    def hold(self, worker: str, tokens: bytes, namespace: str = "", match: Match | None = None) -> Hold:
        """`worker` holds the whole pages of this prompt until the `Hold` is released.

        Of a prompt that is longer than what a request may add, the head is held, and what the tree has of it.
        `match`, if given, is what `match` returned for this prompt, with nothing done to the tree since.
        """
        bit = self._bits[worker]
        usable = len(tokens)
        if self._max_hold_tokens is not None:
            known = 0 if match is None else match.tokens
            usable = min(usable, max(known, self._max_hold_tokens) * TOKEN_BYTES)
        usable -= usable % self._page_bytes
        if not usable:
            return Hold(bit, None)
        if match is None or match.end is None:
            leaf = self._claim(self._root(namespace), 0, tokens, usable)
        else:
            leaf = self._grow(*match.end, match.tokens, tokens, usable)
        for node in _upwards(leaf):
            if not node.refs:
                self._unlist(node)
                node.refs = {bit: 1}
                node.held = bit
            else:
                node.refs[bit] = node.refs.get(bit, 0) + 1
                node.held |= bit
        hold = Hold(bit, leaf)
        self._holds[bit].add(hold)
        return hold

    def release(self, hold: Hold, served: bool = True) -> None:
        """The request is over. `served`: the worker has computed its prompt; without events it keeps it."""
        leaf, hold.leaf = hold.leaf, None
        if leaf is None:
            return
        bit = hold.bit
        self._holds[bit].discard(hold)
        if self._lingering:
            self._stop_lingering(leaf, hold)
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
            if not node.refs:
                node.refs = _NO_REFS
                self._list(node)
        self._tidy_upwards(leaf)
        self._shrink()

    def linger(self, hold: Hold) -> None:
        """The request is over, and its worker's events will say soon what is left of it.

        From the moment that an event confirms the prefix, only events say whether it is still there; until then
        it is held on, unless it is released before.
        """
        if hold.leaf is not None:
            self._lingering.setdefault(hold.leaf, []).append(hold)

    def is_confirmed(self, hold: Hold) -> bool:
        """The worker's own events say that it has all that `hold` stands for."""
        return hold.leaf is None or bool(hold.leaf.confirmed & hold.bit)

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
        that do not fill the blocks. A worker with such blocks is taken to keep what it has served from then on.
        """
        bit = self._bits[worker]
        if block_tokens % self.page_size:
            self.misfits += 1
            self._assumed |= bit
            return
        if len(tokens) != len(hashes) * block_tokens * TOKEN_BYTES:
            self.misfits += 1
            return
        if not hashes:
            return
        if parent is None:
            leaf = self._claim(self._root(namespace), 0, tokens, len(tokens))
            depth = 0
        else:
            above = self._find(bit, parent)
            if above is None:
                self.unknown_parents += 1
                return
            anchor, depth = above
            leaf = self._claim(anchor, depth, tokens, len(tokens))
        settled: list[Hold] = []
        for node in _upwards(leaf):
            if node.start >= depth:
                self._confirm(node, bit)
                if self._lingering and node in self._lingering:
                    settled += [hold for hold in self._lingering[node] if hold.bit == bit]
            if not node.refs:
                self._list(node)
        self._block_tokens[bit] = block_tokens
        self._name_blocks(hashes, leaf, leaf.end, block_tokens)
        self._tidy_upwards(leaf)
        for hold in settled:
            self.release(hold)
        self._shrink()

    def removed(self, worker: str, hashes: tuple[int, ...]) -> None:
        """`worker` has dropped these blocks, and all that it held below them. Unknown ones are counted."""
        bit = self._bits[worker]
        block_tokens = self._block_tokens[bit]
        gone: list[tuple[int, _Run, list[int]]] = []
        for run, blocks in self._by_run(hashes):
            end = None if run is None else run.end_at(_first_index(run.hashes, blocks))
            if run is None or end is None or self._held_at(bit, run, end) is None:
                self.unknown_removes += len(blocks)
            else:
                gone.append((end, run, blocks))
        gone.sort(key=lambda entry: entry[0])  # the shallowest first: it clears the deeper ones with it
        for end, run, blocks in gone:
            node = self._held_at(bit, run, end)
            if node is not None:
                self._clear_block(node, end - block_tokens, bit)
            node = _spanning(run.leaf, end)
            if not (node.attached and node.confirmed):
                for block in blocks:
                    self._blocks.pop(block, None)
                if tuple(blocks) == run.hashes:
                    run.hashes = ()

    def clear(self, worker: str) -> None:
        """`worker` caches nothing any more; what is in flight there stays held."""
        bit = self._bits[worker]
        for root in list(self._roots.values()):
            for child in list(root.children.values()):
                if child.confirmed & bit:
                    self._clear_below(child, bit)
        for _ in range(len(self._runs)):
            self._look_after(self._runs.popleft())

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
            "blocks": len(self._blocks),
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
                listed = (child in self._guessed) + (child in self._confirmed)
                assert listed == (not child.refs), "what is not in flight can be evicted, and nothing else"
                nodes += 1
                tokens += child.end - child.start
                for bit in held_tokens:
                    held_tokens[bit] += child.end - child.start if child.confirmed & bit else 0
                    refs[bit] += child.refs.get(bit, 0)
                stack.append(child)
        assert (tokens, nodes) == (self.tokens, self.nodes)
        assert held_tokens == self._held_tokens
        assert not _NO_CHILDREN
        assert not _NO_REFS
        lingering = {hold for holds in self._lingering.values() for hold in holds}
        assert all(hold.leaf is not None and hold in self._holds[hold.bit] for hold in lingering)
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

    def _names_of(self, mask: int) -> tuple[str, ...]:
        """The workers of a mask, in the order of their bits."""
        names = self._holder_sets.get(mask)
        if names is None:
            if len(self._holder_sets) >= _MAX_HOLDER_SETS:
                self._holder_sets.clear()
            names = self._holder_sets[mask] = tuple(self._names[bit] for bit in _bits(mask))
        return names

    def _claim(self, anchor: Node, depth: int, tokens: bytes, usable: int) -> Node:
        """The node that ends exactly `usable` bytes of `tokens` below `depth` in `anchor`; made where missing."""
        node = anchor if depth == anchor.end else self._split(anchor, depth)
        part: Node | None = None
        at = 0
        while (child := node.children.get(tokens[at : at + self._page_bytes])) is not None:
            if tokens.startswith(child.key, at):
                at += len(child.key)
                node = child
            else:
                at += self._common_bytes(child.key, tokens, at)
                part = child
                break
        return self._grow(node, part, depth + at // TOKEN_BYTES, tokens, usable, depth)

    def _grow(
        self, node: Node, part: Node | None, depth: int, tokens: bytes, usable: int, start: int = 0
    ) -> Node:
        """The node that ends `usable` bytes of `tokens` below `start`, of which all up to `depth` are there:
        whole nodes down to `node`, and the head of `part`."""
        if part is not None:
            node = self._split(part, depth)
        at = (depth - start) * TOKEN_BYTES
        return node if at == usable else self._attach(node, tokens[at:usable])

    def _attach(self, parent: Node, key: bytes) -> Node:
        length = len(key) // TOKEN_BYTES
        node = Node(key, parent.end, parent.end + length, parent)
        if not parent.children:
            parent.children = {}
        parent.children[key[: self._page_bytes]] = node
        self.nodes += 1
        self.tokens += length
        return node

    def _detach(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None
        assert not node.children
        del parent.children[node.key[: self._page_bytes]]
        if not parent.children:
            parent.children = _NO_CHILDREN
        self._unlist(node)
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
        upper.confirmed, upper.held = node.confirmed, node.held
        if node.refs:
            upper.refs = dict(node.refs)
        else:
            self._list(upper)
        parent.children[node.key[: self._page_bytes]] = upper
        node.key = node.key[cut:]
        node.start = depth
        node.parent = upper
        upper.children = {node.key[: self._page_bytes]: node}
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
        self._unlist(node)
        node.key = b""
        node.children = _NO_CHILDREN
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
            if node in self._confirmed and not node.confirmed & ~self._assumed:
                self._list(node)

    def _stop_lingering(self, leaf: Node, hold: Hold) -> None:
        holds = self._lingering.get(leaf)
        if holds is not None and hold in holds:
            holds.remove(hold)
            if not holds:
                del self._lingering[leaf]

    # -- block hashes

    def _name_blocks(self, hashes: tuple[int, ...], leaf: Node, end: int, block_tokens: int) -> None:
        known = self._blocks.get(hashes[-1])
        if (
            known is not None
            and known.hashes == hashes
            and known.block_tokens == block_tokens
            and known.end == end
            and _spanning(known.leaf, end) is _spanning(leaf, end)
        ):
            return
        run = _Run(hashes, leaf, end, block_tokens)
        self._blocks.update(dict.fromkeys(hashes, run))
        self._runs.append(run)
        for _ in range(_RUNS_PER_EVENT):
            self._look_after(self._runs.popleft())

    def _look_after(self, run: _Run) -> None:
        """Forgets the blocks of `run` that nobody holds any more; they are its last ones."""
        if not run.hashes:
            return
        node = _live(run.leaf)
        if node.attached and node.confirmed and self._blocks.get(run.hashes[-1]) is run:
            run.leaf = node
            self._runs.append(run)
            return
        limit = run.end
        while node.parent is not None and not (node.attached and node.confirmed):
            limit = min(limit, node.start)
            node = _live(node.parent)
        if node.parent is None:
            limit = 0
        run.leaf = node
        kept = max(0, len(run.hashes) - -(-(run.end - limit) // run.block_tokens))
        for block in run.hashes[kept:]:
            if self._blocks.get(block) is run:
                del self._blocks[block]
        if kept < len(run.hashes):
            run.end = run.end_at(kept - 1) if kept else 0
            run.hashes = run.hashes[:kept]
        if any(self._blocks.get(block) is run for block in run.hashes):
            self._runs.append(run)

    def _by_run(self, hashes: tuple[int, ...]) -> Iterator[tuple[_Run | None, list[int]]]:
        """Consecutive blocks of the same run together."""
        for run, blocks in groupby(hashes, self._blocks.get):
            yield run, list(blocks)

    def _find(self, bit: int, block: int) -> tuple[Node, int] | None:
        """The node in which a block ends, and the depth; None when `bit` does not hold it."""
        run = self._blocks.get(block)
        if run is None:
            return None
        end = run.end_of(block)
        node = self._held_at(bit, run, end)
        return None if node is None else (node, end)

    def _held_at(self, bit: int, run: _Run, end: int) -> Node | None:
        """The node that spans depth `end` of a run, if `bit` holds it."""
        node = _spanning(run.leaf, end)
        return node if node.attached and node.confirmed & bit else None

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

    def _tidy_upwards(self, node: Node) -> None:
        while (parent := node.parent) is not None:
            if len(node.children) < 2:
                self._tidy(node)
            node = parent if parent.alias is None else _live(parent)
        if not node.children and isinstance(node, _Root):
            self._roots.pop(node.namespace, None)

    # -- eviction

    def _list(self, node: Node) -> None:
        """No request in flight refers to `node`: of its kind it is the last to go."""
        if node.confirmed & ~self._assumed:
            listed, other = self._confirmed, self._guessed
        else:
            listed, other = self._guessed, self._confirmed
        other.pop(node, None)
        listed[node] = None
        listed.move_to_end(node)

    def _unlist(self, node: Node) -> None:
        self._guessed.pop(node, None)
        self._confirmed.pop(node, None)

    def _shrink(self) -> None:
        """Evicts leaves until the tree is small enough, or all that is left is in use."""
        while self.tokens > self.max_tree_tokens and (listed := self._guessed or self._confirmed):
            node = next(iter(listed))
            if node.children:  # divided since it was used
                listed.move_to_end(node)
            else:
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


def _bits(mask: int) -> Iterator[int]:
    """The bits that are set in `mask`, lowest first."""
    while mask:
        bit = mask & -mask
        yield bit
        mask ^= bit


def _live(node: Node) -> Node:
    """What has become of `node` where nodes were joined."""
    live = node
    while live.alias is not None:
        live = live.alias
    if live is not node:
        node.alias = live
    return live


def _spanning(node: Node, depth: int) -> Node:
    """The node with start < depth <= end on the way from `node` up to the root."""
    while True:
        if node.alias is not None:
            node = _live(node)
        if depth > node.start:
            return node
        assert node.parent is not None
        node = node.parent


def _upwards(node: Node) -> Iterator[Node]:
    """`node` and those above it, the root left out."""
    while node.parent is not None:
        yield node
        node = node.parent


def _first_index(hashes: tuple[int, ...], blocks: list[int]) -> int:
    """The place in `hashes` of the first of `blocks`, which are all among them."""
    first = hashes.index(blocks[0])
    if hashes[first : first + len(blocks)] == tuple(blocks):
        return first
    return min(map(hashes.index, blocks))
