"""Which worker holds which prefix: one radix tree over token ids for all workers.

A node is a run of tokens that all who hold any of it hold together. A worker holds a node in one of two ways:

* *confirmed*: the worker's own KV events said so. A worker that sends no events, or blocks that are not a whole
  number of pages, never confirms anything; what it has served is taken as confirmed until it is evicted here.
* *held*: a request in flight was sent there with this prompt, so the prefix is or soon will be there. Counted per
  request and gone with the request, so what no event confirms disappears by itself.

What a worker holds is contiguous from the root, so a node's holders are among its parent's. All boundaries lie on
whole pages, because replicas cache whole pages only.

Nothing is ever swept as a whole except by `clear`: eviction takes leaves from the front of a list.
"""

from collections.abc import Collection
from dataclasses import dataclass, field

import msgspec

from router.events import TOKEN_BYTES
from router.radix.blocks import BlockIndex, Run
from router.radix.node import NO_REFS, Node, WorkerBits, bits, live, spanning, upwards
from router.radix.structure import Structure


class Match(msgspec.Struct, gc=False):
    """How much of one prompt each worker holds, in tokens, always whole pages. Not to be changed.

    `lengths` has an entry for each worker that holds any. `holders`, in a fixed order, are those with the longest
    match, which is of `tokens` tokens. `branches` are the depths up to `tokens` at which other prompts left it.
    """

    tokens: int = 0
    holders: Collection[str] = ()
    lengths: dict[str, int] = {}
    branches: tuple[int, ...] = ()
    end: tuple[Node, Node | None] | None = None
    """For the tree: the last node that is matched whole, and the one below it that is matched in part."""

    def of(self, worker: str) -> int:
        """How many tokens of the prompt `worker` holds."""
        return self.lengths.get(worker, 0)


class Hold:
    """One request in flight holds its prompt's prefix at one worker. Releasing it twice is harmless."""

    __slots__ = ("bit", "leaf")

    def __init__(self, bit: int, leaf: Node | None) -> None:
        self.bit = bit
        self.leaf = leaf


@dataclass(slots=True, eq=False)
class _Holdings:
    """What the tree knows of one worker."""

    block_tokens: int
    """Of its last event."""
    tokens: int = 0
    """Confirmed."""
    holds: set[Hold] = field(default_factory=set)


class RadixTree:
    """The tree of all workers and namespaces. What is of several models has several namespaces (`workers.Pool.key`).

    Memory is bounded by `max_tree_tokens` plus the prompts in flight. Beyond, leaves are evicted that no request in
    flight refers to, the least recently used first. That happens when a request ends and when an event comes, not while
    a request waits for its placement. One request adds at most 1 / `hold_part` of the limit to the tree, so that a long
    prompt does not push out what others have cached; None: all of it.
    """

    def __init__(
        self,
        page_size: int = 16,
        max_tree_tokens: int = 8_000_000,
        hold_part: int | None = None,
    ) -> None:
        if page_size < 1:
            raise ValueError(f"page_size is {page_size}: a page has at least one token")
        if max_tree_tokens < page_size:
            raise ValueError(f"max_tree_tokens is {max_tree_tokens}: not even one page of {page_size}")
        self.page_size = page_size
        self.max_tree_tokens = max_tree_tokens
        self.unknown_parents = 0
        self.unknown_removes = 0
        self.misfits = 0
        self.evicted_tokens = 0
        self._hold_part = hold_part
        self._structure = Structure(page_size)
        self._blocks = BlockIndex()
        self._workers = WorkerBits()
        self._holdings: dict[int, _Holdings] = {}
        """By worker bit."""
        self._assumed = 0
        """Mask of the workers that send no usable events."""

    @property
    def tokens(self) -> int:
        """Tokens in the tree, each counted once however many workers hold it."""
        return self._structure.tokens

    @property
    def nodes(self) -> int:
        """Nodes in the tree, without the roots of namespaces."""
        return self._structure.nodes

    def resize(self, max_tree_tokens: int) -> None:
        """It holds so much from now on. A tree that is too large shrinks with the next request or event."""
        self.max_tree_tokens = max_tree_tokens

    # -- workers

    def add_worker(self, worker: str, has_events: bool = True) -> None:
        """From now on `worker` can hold prefixes. Without events it is taken to keep what it has served."""
        bit = self._workers.add(worker)
        if not has_events:
            self._assumed |= bit
        self._holdings[bit] = _Holdings(self.page_size)

    def remove_worker(self, worker: str) -> None:
        """`worker` is gone, with its cache and its requests."""
        bit = self._workers.of[worker]
        for hold in list(self._holdings[bit].holds):
            self.release(hold, served=False)
        self.clear(worker)
        self._workers.remove(worker)
        del self._holdings[bit]
        self._assumed &= ~bit

    def worker_tokens(self, worker: str) -> int:
        """Tokens that `worker` is confirmed (or, without events, assumed) to hold."""
        return self._holdings[self._workers.of[worker]].tokens

    # -- requests

    def match(self, tokens: bytes, namespace: str = "") -> Match:
        """How much of the prompt each worker holds, confirmed or in flight. The tree stays as it is."""
        root = self._structure.roots.get(namespace)
        if root is None:
            return Match()
        node: Node = root
        part: Node | None = None
        steps: list[tuple[int, int]] = []  # (holders, down to which depth), wherever the holders change
        branches: list[int] = []
        page_bytes = self._structure.page_bytes
        at = depth = holders = 0
        while (child := node.children.get(tokens[at : at + page_bytes])) is not None:
            if (mask := child.confirmed | child.held) != holders:
                steps.append((holders, depth))
                holders = mask
            if not tokens.startswith(child.key, at):
                at += self._structure.common_bytes(child.key, tokens, at)
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
        longest = self._workers.names(holders)
        lengths = dict.fromkeys(longest, depth)
        for mask, shorter in reversed(steps):
            if mask & ~holders:
                lengths.update(dict.fromkeys(self._workers.names(mask & ~holders), shorter))
                holders |= mask
        return Match(depth, longest, lengths, tuple(branches), (node, part))

    def hold(
        self,
        worker: str,
        tokens: bytes,
        namespace: str = "",
        match: Match | None = None,
    ) -> Hold:
        """`worker` holds the whole pages of this prompt until the `Hold` is released.

        If the prompt is longer than one request may add, its head is held, and whatever the tree has of it already.
        `match`, if given, must be the result of `match` for this prompt on the tree as it is.
        """
        bit, structure = self._workers.of[worker], self._structure
        usable = len(tokens)
        if self._hold_part is not None:
            known = 0 if match is None else match.tokens
            usable = min(usable, max(known, self.max_tree_tokens // self._hold_part) * TOKEN_BYTES)
        usable -= usable % structure.page_bytes
        if not usable:
            return Hold(bit, None)
        if match is None or match.end is None:
            leaf = structure.claim(structure.root(namespace), 0, tokens, usable)
        else:
            leaf = structure.grow(*match.end, match.tokens, tokens, usable)
        node = leaf
        while (above := node.parent) is not None:
            if refs := node.refs:
                refs[bit] = refs.get(bit, 0) + 1
                node.held |= bit
            else:
                structure.evictable.pop(node, None)
                node.refs = {bit: 1}
                node.held = bit
            node = above
        hold = Hold(bit, leaf)
        self._holdings[bit].holds.add(hold)
        return hold

    def release(self, hold: Hold, served: bool = True) -> None:
        """The request is over. `served`: the worker has computed its prompt; a worker without events keeps it."""
        leaf, hold.leaf = hold.leaf, None
        if leaf is None:
            return
        bit = hold.bit
        self._holdings[bit].holds.discard(hold)
        keeps = served and bool(bit & self._assumed)
        for node in upwards(leaf):
            count = node.refs[bit] - 1
            if count:
                node.refs[bit] = count
            else:
                del node.refs[bit]
                node.held &= ~bit
            if keeps:
                self._confirm(node, bit)
            if not node.refs:
                node.refs = NO_REFS
                self._structure.used(node)
        self._structure.tidy_upwards(leaf)
        self._shrink()

    def is_confirmed(self, hold: Hold) -> bool:
        """Whether the worker's own events say that it has all that `hold` stands for."""
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
        """`worker` confirms `len(hashes)` blocks below block `parent`, or at the start of a prompt if that is None.

        Counted and ignored: an unknown parent; a block size that is not a whole number of pages; tokens that do not
        fill the blocks. A worker with such a block size is taken to keep what it serves from then on.
        """
        bit, structure = self._workers.of[worker], self._structure
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
            leaf = structure.claim(structure.root(namespace), 0, tokens, len(tokens))
            depth = 0
        else:
            above = self._blocks.find(bit, parent)
            if above is None:
                self.unknown_parents += 1
                return
            anchor, depth = above
            leaf = structure.claim(anchor, depth, tokens, len(tokens))
        for node in upwards(leaf):
            if node.start >= depth:
                self._confirm(node, bit)
            if not node.refs:
                structure.used(node)
        self._holdings[bit].block_tokens = block_tokens
        self._blocks.add(hashes, leaf, leaf.end, block_tokens)
        structure.tidy_upwards(leaf)
        self._shrink()

    def removed(self, worker: str, hashes: tuple[int, ...]) -> None:
        """`worker` has evicted these blocks, so it holds nothing below them either. Unknown ones are counted."""
        bit = self._workers.of[worker]
        block_tokens = self._holdings[bit].block_tokens
        gone: list[tuple[int, Run, list[int]]] = []
        for run, blocks in self._blocks.by_run(hashes):
            end = None if run is None else run.end_of_first(blocks)
            if run is None or end is None or run.node_at(bit, end) is None:
                self.unknown_removes += len(blocks)
            else:
                gone.append((end, run, blocks))
        gone.sort(key=lambda entry: entry[0])  # the shallowest first: the deeper ones go with it
        for end, run, blocks in gone:
            node = run.node_at(bit, end)
            if node is not None:
                self._clear_block(node, end - block_tokens, bit)
            node = spanning(run.leaf, end)
            if not (node.attached and node.confirmed):
                self._blocks.forget(run, blocks)

    def clear(self, worker: str) -> None:
        """The cache of `worker` is empty; what is in flight there stays held."""
        bit = self._workers.of[worker]
        for root in list(self._structure.roots.values()):
            for child in list(root.children.values()):
                if child.confirmed & bit:
                    self._clear_below(child, bit)
        self._blocks.look_after_all()

    # -- looking in

    def counters(self) -> dict[str, int]:
        return {
            "tokens": self.tokens,
            "max_tokens": self.max_tree_tokens,
            "nodes": self.nodes,
            "namespaces": len(self._structure.roots),
            "blocks": len(self._blocks),
            "unknown_parents": self.unknown_parents,
            "unknown_removes": self.unknown_removes,
            "misfits": self.misfits,
            "evicted_tokens": self.evicted_tokens,
        }

    # -- what a worker holds

    def _confirm(self, node: Node, bit: int) -> None:
        if not node.confirmed & bit:
            node.confirmed |= bit
            self._holdings[bit].tokens += node.end - node.start

    def _unconfirm(self, node: Node, bit: int) -> None:
        if node.confirmed & bit:
            node.confirmed &= ~bit
            self._holdings[bit].tokens -= node.end - node.start

    def _clear_block(self, node: Node, start: int, bit: int) -> None:
        """Worker `bit` does not hold the block from `start` that ends in `node`, nor anything below.

        A block longer than a page may have its head in nodes above, which other blocks can share: those stay where
        another child has the bit.
        """
        while node.start > start:
            above = node.parent
            assert above is not None
            if any(child is not node and child.confirmed & bit for child in above.children.values()):
                break
            node = above
        if node.start < start:
            self._structure.split(node, start)
        self._clear_below(node, bit)

    def _clear_below(self, top: Node, bit: int) -> None:
        """Worker `bit` holds neither `top` nor anything below."""
        order = [top]
        for node in order:
            order += [child for child in node.children.values() if child.confirmed & bit]
        for node in reversed(order):
            self._unconfirm(node, bit)
            self._structure.tidy(node)
        self._structure.tidy_upwards(top)

    # -- eviction

    def _shrink(self) -> None:
        """Evicts leaves until the tree is small enough, or all that is left is in use."""
        while self._structure.tokens > self.max_tree_tokens:
            leaf = self._structure.next_leaf()
            if leaf is None:
                return
            self._evict(leaf)

    def _evict(self, leaf: Node) -> None:
        """Nobody holds `leaf` any more, nor the head of a block of which it had the rest."""
        self.evicted_tokens += leaf.end - leaf.start
        above = leaf.parent
        assert above is not None
        holders = leaf.confirmed
        for bit in bits(holders):
            self._unconfirm(leaf, bit)
        self._structure.tidy_upwards(leaf)
        for bit in bits(holders):
            node = live(above)
            head = leaf.start - leaf.start % self._holdings[bit].block_tokens
            shared = node.end > leaf.start or any(child.confirmed & bit for child in node.children.values())
            if head < leaf.start and not shared and node.confirmed & bit:
                self._clear_block(node, head, bit)
