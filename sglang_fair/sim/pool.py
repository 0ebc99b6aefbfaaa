"""The KV pool of a simulated replica: whole pages that are free, cached, or a running request's own.

A running request holds a locked path in the prefix cache and, behind it, pages of its own. `keep` and `release` hand
its pages to the cache.
"""

from collections.abc import Iterable, Sequence

from sglang_fair.sim.budget import Settings
from sglang_fair.sim.cache import Node, PrefixCache
from sglang_fair.sim.task import Task


class Pool:
    """Counts the free pages; `cache` counts the others."""

    def __init__(self, settings: Settings, cache: PrefixCache) -> None:
        self.settings = settings
        self.cache = cache
        self.free_pages = settings.pages

    def room_tokens(self) -> int:
        """Tokens that are free or can be evicted."""
        return self.free_pages * self.settings.page_tokens + self.cache.evictable_tokens

    def make_free(self, tokens: int) -> None:
        """Evict until so many tokens are free, or nothing is left to evict."""
        shortfall = tokens - self.free_pages * self.settings.page_tokens
        if shortfall > 0:
            self.free_pages += self.cache.evict(shortfall) // self.settings.page_tokens

    def make_free_pages(self, pages: int) -> bool:
        """Whether so many pages are free now, after eviction."""
        self.make_free(pages * self.settings.page_tokens)
        return pages <= self.free_pages

    def take(self, batch: Sequence[Task]) -> None:
        """The pages of an extend batch. SGLang frees a page for each request beyond the tokens, needed or not."""
        settings = self.settings
        tokens = sum(task.computed - task.start for task in batch)
        self.make_free(tokens + len(batch) * settings.page_tokens)
        self.free_pages -= sum(
            settings.pages_of(task.computed) - settings.pages_of(task.start) for task in batch
        )
        assert self.free_pages >= 0, "a prefill batch was admitted that does not fit the pool"

    def keep(self, task: Task, held: int) -> None:
        """Cache the whole pages of the first `held` of `task.tokens`, and lock them. Copies of what another request
        has cached meanwhile are freed."""
        assert task.node is not None
        page_tokens = self.settings.page_tokens
        end = held // page_tokens * page_tokens
        node, there = self.cache.insert(task.tokens, end, task.node)
        self._divide_at_prompt(task, node)
        self.cache.use(task.job.client, node, end - there)
        self.free_pages += (there - task.node.end) // page_tokens
        self.cache.lock(node, above=task.node)
        task.node = node

    def release(self, task: Task, held: int, written: int, *, keep: bool) -> None:
        """Give up the pages of a request that holds `held` tokens; `keep`: the cache takes the whole ones."""
        assert task.node is not None
        page_tokens = self.settings.page_tokens
        end = task.node.end
        if keep:
            end = held // page_tokens * page_tokens
            known = task.known(written) if end > task.node.end else b""
            node, there = self.cache.insert(known, end, task.node)
            self._divide_at_prompt(task, node)
            self.cache.use(task.job.client, node, end - there)
            self.free_pages += (there - task.node.end) // page_tokens
        self.free_pages += self.settings.pages_of(held) - end // page_tokens
        self.cache.unlock(task.node)
        task.node = None

    def check(self, running: Iterable[tuple[Task, int]]) -> None:
        """AssertionError unless every page is free, cached, or the own one of a running request. `running` has all of
        them, each with the tokens that it holds. O(running)."""
        page_tokens, own = self.settings.page_tokens, 0
        for task, held in running:
            assert task.node is not None
            own += self.settings.pages_of(held) - task.node.end // page_tokens
        assert self.free_pages >= 0
        assert self.free_pages + self.cache.tokens // page_tokens + own == self.settings.pages

    def _divide_at_prompt(self, task: Task, node: Node) -> None:
        """Let a node end with the prompt, so that the output can be evicted without it."""
        end = task.prompt_tokens // self.settings.page_tokens * self.settings.page_tokens
        if 0 < end < node.end:
            self.cache.divide(node, end)
