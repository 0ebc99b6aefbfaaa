"""Who pays for a prefix that several clients use: a choice that DLPM leaves open.

A prompt is a chain of blocks. A cached block has a price: what was charged for computing it.

    rule      who pays that price
    first     the client whose request computed it; hits are free for all others. Needs nothing of this file
    equal     all clients that have used it since it was computed, in equal parts
    per-use   those clients in proportion to how many of their requests have used it

A client that hits the cache is charged its share, and those who paid before are refunded as much: the transfers of one
admission sum to 0. `equal` is settled at each new user; `per-use` at the first nine uses, then whenever the uses
of a segment have grown by an eighth. A block that is computed again begins a new history. Free for all are what the
server computes by its own choice, outputs that a later prompt repeats, pieces shorter than a block, and what is
forgotten.

Bound: DLPM's theorem holds for charged service (service plus transfers) if what `Swing` has seen is added to U; for VTC
and DRR nothing is proven. Knobs: the rule, `block_tokens`, `max_entries`, `max_users`. An admission costs a look-up for
each segment of the path, a run of blocks with one history. What to expect: docs/policies.md, "Who pays".
"""

from array import array
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import ClassVar

FIRST, EQUAL, PER_USE = "first", "equal", "per-use"
RULES = (FIRST, EQUAL, PER_USE)

BLOCK_TOKENS = 64


def path_of(
    root: object, tokens: Sequence[int] | memoryview, block_tokens: int = BLOCK_TOKENS
) -> list[Hashable]:
    """The whole blocks of a prompt, each named by a digest of itself and of all before it.

    `root` is what else distinguishes cache entries: an adapter, a salt. A `memoryview` is read without a copy.
    """
    view = tokens if isinstance(tokens, memoryview) else memoryview(array("q", tokens))
    path: list[Hashable] = []
    block = repr(root).encode()
    for end in range(block_tokens, len(view) + 1, block_tokens):
        block = blake2b(block + bytes(view[end - block_tokens : end]), digest_size=16).digest()
        path.append(block)
    return path


@dataclass(slots=True, eq=False)
class Segment:
    """Consecutive blocks with one history. `shares` are the fractions of `price` that its users have been charged."""

    blocks: Sequence[Hashable]
    price: float
    uses: dict[str, int]
    shares: dict[str, float]
    total: int = 1
    """Number of uses by all clients."""
    settled: int = 1
    """`total` when `shares` were settled."""

    def entries(self) -> int:
        return len(self.blocks) + len(self.uses)


@dataclass
class Payers:
    """The histories of cached blocks. ValueError for a rule other than `equal` and `per-use`."""

    rule: str
    block_tokens: int = BLOCK_TOKENS
    max_entries: int = 200_000
    max_users: int = 1000

    GROWTH: ClassVar[int] = 8
    """`per-use` is settled when the uses have grown by one part in this many."""

    _segment_of: dict[Hashable, Segment] = field(default_factory=dict, init=False, repr=False)
    _segments: OrderedDict[Segment, None] = field(default_factory=OrderedDict, init=False, repr=False)
    """The least recently used first."""
    _entries: int = field(default=0, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.rule not in (EQUAL, PER_USE):
            raise ValueError(f"unknown payer {self.rule!r}; there are {', '.join(RULES)}")

    def used(self, client: str, path: Sequence[Hashable], cached_tokens: int) -> Mapping[str, float]:
        """A request of `client` was admitted and found `cached_tokens` of `path` in the cache. Returns what this adds
        to each client's charges, in units; the sum is 0."""
        transfers: dict[str, float] = {}
        covered = self._cover(path, 0, min(len(path), cached_tokens // self.block_tokens))
        for segment in covered:
            if self._count(segment, client):
                self._settle(segment, transfers)
        for segment in reversed(covered):
            self._segments.move_to_end(segment)
        self._forget()
        if transfers:
            transfers.pop(client, None)
            transfers[client] = -sum(transfers.values())
        return transfers

    def computed(
        self, client: str, path: Sequence[Hashable], start: int, stop: int, units: float, carried: float = 0.0
    ) -> float:
        """The engine computed the tokens from `start` to `stop` of `path`, and `client` was charged `units`.

        Returns the units of the last block if it is incomplete; the next call for this prompt takes them as `carried`.
        A block of which another part was already cached keeps its history.
        """
        if stop <= start:
            return carried
        size, price = self.block_tokens, units / (stop - start)
        first, end = start // size, stop // size
        if start % size:
            if first == end:
                return carried + units
            if first < len(path) and path[first] not in self._segment_of:
                self._add(client, path[first : first + 1], carried + price * (size - start % size))
            first += 1
        self.lost(path, first * size, stop)
        self._add(client, path[first:end], price * size * len(path[first:end]))
        self._forget()
        return price * (stop - end * size)

    def lost(self, path: Sequence[Hashable], start: int, stop: int) -> None:
        """The tokens from `start` to `stop` were not in the cache: blocks that begin there lose their history."""
        size = self.block_tokens
        for segment in self._cover(path, -(-start // size), min(len(path), -(-stop // size))):
            self._remove(segment)

    def _cover(self, path: Sequence[Hashable], start: int, stop: int) -> list[Segment]:
        """The segments of the known blocks from `start` to `stop`, split so that they contain no other blocks."""
        covered, at = [], start
        while at < stop:
            segment = self._segment_of.get(path[at])
            if segment is None:
                at += 1
                continue
            if segment.blocks[0] != path[at]:
                segment = self._split(segment, segment.blocks.index(path[at]))
            length = _common(segment.blocks, path, at, stop)
            if length < len(segment.blocks):
                self._split(segment, length)
            covered.append(segment)
            at += length
        return covered

    def _split(self, segment: Segment, at: int) -> Segment:
        """Split `segment` before its block number `at`. Returns the rear part, which is a new segment."""
        price = segment.price / len(segment.blocks)
        rear = Segment(
            segment.blocks[at:],
            price * (len(segment.blocks) - at),
            dict(segment.uses),
            dict(segment.shares),
            segment.total,
            segment.settled,
        )
        segment.blocks, segment.price = segment.blocks[:at], price * at
        self._segments[rear] = None
        self._entries += len(rear.uses)
        self._segment_of.update(dict.fromkeys(rear.blocks, rear))
        return rear

    def _count(self, segment: Segment, client: str) -> bool:
        """Count one more use. Returns whether the segment is to be settled now."""
        uses = segment.uses
        if client not in uses:
            if len(uses) >= self.max_users:
                return False
            uses[client] = 0
            self._entries += 1
        elif self.rule == EQUAL:
            return False
        uses[client] += 1
        segment.total += 1
        return self.rule == EQUAL or segment.total - segment.settled >= segment.settled / self.GROWTH

    def _settle(self, segment: Segment, transfers: dict[str, float]) -> None:
        """Set every user's share to its fraction of the uses, and add the differences to `transfers`."""
        price, total, shares = segment.price, segment.total, segment.shares
        for client, uses in segment.uses.items():
            share = uses / total
            transfers[client] = transfers.get(client, 0.0) + price * (share - shares.get(client, 0.0))
            shares[client] = share
        segment.settled = total

    def _add(self, client: str, blocks: Sequence[Hashable], price: float) -> None:
        if blocks:
            segment = Segment(blocks, price, {client: 1}, {client: 1.0})
            self._segments[segment] = None
            self._entries += segment.entries()
            self._segment_of.update(dict.fromkeys(blocks, segment))

    def _remove(self, segment: Segment) -> None:
        del self._segments[segment]
        self._entries -= segment.entries()
        for block in segment.blocks:
            del self._segment_of[block]

    def _forget(self) -> None:
        while self._entries > self.max_entries:
            self._remove(next(iter(self._segments)))


def _common(blocks: Sequence[Hashable], path: Sequence[Hashable], at: int, stop: int) -> int:
    """How many of `blocks` follow one another in `path` from `at` on. A binary search: a block's name fixes all before
    it."""
    least, most = 1, min(len(blocks), stop - at)
    while least < most:
        middle = (least + most + 1) // 2
        if blocks[middle - 1] == path[at + middle - 1]:
            least = middle
        else:
            most = middle - 1
    return least


def make_payers(rule: str) -> Payers | None:
    """The `Payers` of a rule; None for `first`, which needs none. ValueError for an unknown rule."""
    return None if rule == FIRST else Payers(rule)


@dataclass(slots=True)
class Sway:
    """One client's transfers: units charged since its last admission, and refunds that are not used up yet."""

    charged: float = 0.0
    refunded: float = 0.0


@dataclass
class Swing:
    """How far transfers have moved any counter. `most_units` is added to the theorem's U.

    Up to `max_clients` are tracked. One that was dropped is assumed to be as far off as the farthest dropped one.
    """

    max_clients: int = 10_000
    most_charged: float = field(default=0.0, init=False)
    most_refunded: float = field(default=0.0, init=False)
    _sways: OrderedDict[str, Sway] = field(default_factory=OrderedDict, init=False, repr=False)
    _dropped: Sway = field(default_factory=Sway, init=False, repr=False)

    @property
    def most_units(self) -> float:
        return self.most_charged + self.most_refunded

    def transferred(self, client: str, units: float) -> None:
        sway = self._sways.get(client)
        if sway is None:
            sway = self._sways[client] = Sway(self._dropped.charged, self._dropped.refunded)
        self._sways.move_to_end(client)
        if units > 0:
            sway.charged += units
            self.most_charged = max(self.most_charged, sway.charged)
            sway.refunded = max(0.0, sway.refunded - units)
        else:
            sway.refunded -= units
            self.most_refunded = max(self.most_refunded, sway.refunded)
        if len(self._sways) > self.max_clients:
            _, gone = self._sways.popitem(last=False)
            self._dropped.charged = max(self._dropped.charged, gone.charged)
            self._dropped.refunded = max(self._dropped.refunded, gone.refunded)

    def admitted(self, client: str) -> None:
        """A request of `client` is admitted, and its counter is positive."""
        sway = self._sways.get(client)
        if sway is not None:
            sway.charged = 0.0

    def charged(self, client: str, units: float) -> None:
        """`client` was given `units` of service."""
        sway = self._sways.get(client)
        if sway is not None:
            sway.refunded = max(0.0, sway.refunded - units)
