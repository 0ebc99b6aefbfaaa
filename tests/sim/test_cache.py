"""The simulated replica's prefix cache beside a plain one, and its events beside what it has."""

from collections.abc import Iterable

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from sglang_fair.sim.cache import Node, PrefixCache, Removed

PAGE = 2
Tokens = tuple[int, ...]


def packed(tokens: Tokens) -> bytes:
    return np.array(tokens, dtype="<u4").tobytes()


class PlainCache:
    """The same rules without a tree: a node is the prompt's head that it ends, in whole pages.

    Its parent is the longest node that it begins with, and it is a leaf when it begins no other one.
    """

    def __init__(self) -> None:
        self.used: dict[Tokens, int] = {}
        self.locks: dict[Tokens, int] = {}
        self.clock = 0

    def match(self, tokens: Tokens, most: int) -> Tokens:
        head = self._longest(tokens[: most // PAGE * PAGE])
        self._use(head)
        return head

    def insert(self, tokens: Tokens) -> None:
        self._use(self._longest(tokens))
        if tokens and tokens not in self.used:
            self._touch(tokens)

    def divide(self, end: Tokens) -> None:
        self._longest(end)
        self._use(end)

    def evict(self, tokens: int) -> int:
        freed = 0
        while freed < tokens:
            leaves = [node for node in self.used if not self.is_locked(node) and self.is_leaf(node)]
            if not leaves:
                break
            leaf = min(leaves, key=self.used.__getitem__)
            del self.used[leaf]
            freed += len(leaf) - max((len(node) for node in self._above(leaf)), default=0)
        return freed

    def is_leaf(self, node: Tokens) -> bool:
        return not any(other != node and other[: len(node)] == node for other in self.used)

    def is_locked(self, node: Tokens) -> bool:
        return any(count and lock[: len(node)] == node for lock, count in self.locks.items())

    def pages(self) -> set[Tokens]:
        """Every cached prefix of whole pages."""
        return {node[:end] for node in self.used for end in range(PAGE, len(node) + 1, PAGE)}

    def _longest(self, tokens: Tokens) -> Tokens:
        """The longest cached prefix, which is a node from now on; what it was divided from is used."""
        pages = self.pages()
        head: Tokens = ()
        while (longer := tokens[: len(head) + PAGE]) in pages and len(longer) == len(head) + PAGE:
            head = longer
        if head and head not in self.used:
            lower = min((node for node in self.used if node[: len(head)] == head), key=len)
            self._touch(lower)
            self.used[head] = self.used[lower]
        return head

    def _use(self, node: Tokens) -> None:
        for above in [*self._above(node), *([node] if node else [])]:
            self._touch(above)

    def _above(self, node: Tokens) -> list[Tokens]:
        return sorted(
            (other for other in self.used if other != node and node[: len(other)] == other), key=len
        )

    def _touch(self, node: Tokens) -> None:
        self.clock += 1
        self.used[node] = self.clock


def prompts() -> st.SearchStrategy[Tokens]:
    """Few tokens, so that prompts share heads."""
    return st.lists(st.sampled_from([0, 1]), min_size=1, max_size=12).map(tuple)


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("request"), prompts(), st.integers(0, 3)),
        st.tuples(st.just("end"), st.integers(0, 9), st.lists(st.sampled_from([0, 1]), max_size=5)),
        st.tuples(st.just("evict"), st.integers(1, 12), st.none()),
    ),
    max_size=60,
)


@given(OPERATIONS)
def test_it_matches_locks_and_evicts_as_a_cache_without_a_tree(operations):
    compare(operations)


def compare(operations: Iterable[tuple]) -> None:
    """A request matches its prompt, locks that, inserts the whole and locks it; at its end its output is inserted."""
    cache, plain = PrefixCache(PAGE), PlainCache()
    running: list[tuple[Tokens, Node]] = []
    known: dict[int, Tokens] = {}
    for kind, what, more in operations:
        if kind == "request":
            node, head = cache.match(packed(what), len(what) - 1), plain.match(what, len(what) - 1)
            assert node.end == len(head)
            end = len(what) // PAGE * PAGE
            free = cache.unlocked_tokens(node)
            before = cache.evictable_tokens
            cache.lock(node)
            assert before - cache.evictable_tokens == free
            if more:  # others may come between
                assert cache.evict(more) == evicted(plain, head, more)
            there = cached_tokens(plain, what[:end])
            leaf, found = cache.insert(packed(what), end, node)
            plain.insert(what[:end])
            assert (leaf.end, found) == (end, there)
            cache.lock(leaf, above=node)
            lock(plain, what[:end], 1)
            running.append((what, leaf))
        elif kind == "end" and running:
            prompt, node = running.pop(what % len(running))
            tokens = prompt + tuple(more)
            end, prompt_end = len(tokens) // PAGE * PAGE, len(prompt) // PAGE * PAGE
            leaf, _ = cache.insert(packed(tokens), end, node)
            plain.insert(tokens[:end])
            if 0 < prompt_end < end:
                cache.divide(leaf, prompt_end)
                plain.divide(prompt[:prompt_end])
            cache.unlock(node)
            lock(plain, prompt[:prompt_end], -1)
        elif kind == "evict":
            assert cache.evict(what) == plain.evict(what)
        follow(cache, known)
        assert set(known.values()) == plain.pages()
        locked = {page for page in plain.pages() if plain.is_locked(page)}
        assert cache.locked_tokens == PAGE * len(locked)
        assert cache.tokens == PAGE * len(plain.pages())


def evicted(plain: PlainCache, head: Tokens, tokens: int) -> int:
    lock(plain, head, 1)
    freed = plain.evict(tokens)
    lock(plain, head, -1)
    return freed


def lock(plain: PlainCache, node: Tokens, count: int) -> None:
    if node:
        plain.locks[node] = plain.locks.get(node, 0) + count


def cached_tokens(plain: PlainCache, tokens: Tokens) -> int:
    return max((len(page) for page in plain.pages() if tokens[: len(page)] == page), default=0)


def follow(cache: PrefixCache, known: dict[int, Tokens]) -> None:
    """Keep the prefix that each block ends, from the events alone."""
    for event in cache.drain(0.0):
        if isinstance(event, Removed):
            for name in event.hashes:
                del known[name]
            continue
        head = () if event.parent is None else known[event.parent]
        tokens = tuple(np.frombuffer(event.tokens, dtype="<u4").tolist())
        assert len(tokens) == len(event.hashes) * event.block_tokens
        for at, name in enumerate(event.hashes):
            assert name not in known
            known[name] = head + tokens[: (at + 1) * event.block_tokens]
