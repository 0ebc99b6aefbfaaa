"""Requests inside a simulated replica, and its KV pool: whole pages that are free, cached, or a running request's own.

A running request holds a locked path in the prefix cache and, behind it, pages of its own. `keep` and `release` hand
its pages to the cache.
"""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field

from sglang_fair.core.admission import block_of
from sglang_fair.core.job import Job
from sglang_fair.sim.answers import TOKEN_BYTES, answer
from sglang_fair.sim.budget import Settings
from sglang_fair.sim.cache import Node, PrefixCache
from sglang_fair.sim.events import SimRequest


@dataclass(slots=True, eq=False)
class Task:
    """A request from its arrival to its end: where its tokens are, and how far it is."""

    request: SimRequest
    job: Job
    prompt_tokens: int
    output_limit: int
    """Tokens of its answer."""
    tokens: bytes
    """What has to be computed before it decodes: its prompt; after a retraction with its output so far."""
    length: int
    found: Node | None = None
    """The end of its cached prefix as last looked up."""
    node: Node | None = None
    """The end of what it has locked in the cache."""
    start: int = 0
    computed: int = 0
    """`tokens` from `start` to `computed` are computed in the step under way; those before are in the pool."""
    loaded: int = 0
    """Of these, the first so many come from the host."""
    output: int = 0
    """Output tokens when it joined the decode batch, at step number `joined`."""
    joined: int = 0
    place: int = 0
    """By which the decode batch is ordered; 0 outside."""
    last_step: int = 0
    """The decode step after which it ends."""
    aborted: bool = False
    answer: bytes | None = None
    """All of it; None until it is needed."""
    prompt: memoryview = field(init=False)

    def __post_init__(self) -> None:
        self.prompt = memoryview(self.request.tokens).cast("I")

    def block(self, prefix_tokens: int) -> Hashable | None:
        """Names what would be computed of its prompt behind so many cached tokens."""
        return block_of(self.prompt, prefix_tokens)

    def written(self, step: int) -> int:
        return self.output + step - self.joined

    def held(self, step: int) -> int:
        """Tokens of its context in the pool after that step: all but the last one written."""
        return self.length + step - self.joined

    def said(self, written: int) -> bytes:
        if not written:
            return b""
        if self.answer is None:
            self.answer = answer(self.request.tokens, self.output_limit)
        return self.answer[: written * TOKEN_BYTES]

    def take_back(self, written: int) -> None:
        """It gives its memory up: its prompt and what it has written are to be computed again."""
        self.output = written
        self.tokens, self.found = self.known(written), None
        self.length = self.prompt_tokens + written

    def known(self, written: int) -> bytes:
        """Its prompt and the first `written` tokens of its answer."""
        return self.request.tokens + self.said(written)


class Pool:
    """Counts the free pages; `cache` counts the others."""

    def __init__(self, settings: Settings, cache: PrefixCache) -> None:
        self.settings = settings
        self.cache = cache
        self.free_pages = settings.pages

    def room_tokens(self) -> int:
        return self.free_pages * self.settings.page_tokens + self.cache.evictable_tokens

    def make_free(self, tokens: int) -> None:
        """Evict until so many tokens are free, or nothing is left to evict."""
        shortfall = tokens - self.free_pages * self.settings.page_tokens
        if shortfall > 0:
            self.free_pages += self.cache.evict(shortfall) // self.settings.page_tokens

    def make_free_pages(self, pages: int) -> bool:
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
