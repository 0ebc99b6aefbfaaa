"""How much a prefill batch may take: SGLang's rules for memory and compute.

    room        free pages and cache that no request holds, in tokens
    reserved    what the running requests may still write: for each (most output - output so far), but at most
                `LONGEST_RESERVATION`, times a ratio below 1 that bets on early ends. The ratio decays with each decode
                step and is raised after a retraction. If ends of sequence are ignored it is 1.
    a candidate fits when  extend + most output + a page  <  room - reserved - what the batch has taken
    a cut prompt   until it is computed, its whole rest and its output are taken for every other candidate; no decode
                step takes of the rest (`Replica._can_decode`), so that there is always room for it (`overlay.room`)
    compute     extend tokens, rounded up to pages, count against the chunk size and `max_prefill_tokens`. A prompt
                that is longer than the rest of the chunk is cut at a page boundary and ends the batch

Source: SGLang 0.5.23, `PrefillAdder`, `PrefillBudget`, `NewTokenRatioTracker`.
"""

from dataclasses import dataclass
from enum import Enum, auto

LONGEST_RESERVATION = 4096
"""Output tokens that are reserved for one request at most (SGLang's CLIP_MAX_NEW_TOKENS)."""

RETRACT_STEPS = 20
"""Decode steps that a retraction makes room for."""


class Verdict(Enum):
    """May another request join the batch?"""

    GO_ON = auto()
    NO_MEMORY = auto()
    FULL = auto()
    """The step has as many prompt tokens as it may."""


@dataclass(frozen=True, slots=True)
class Settings:
    """A replica's server arguments. ValueError for impossible ones."""

    kv_tokens: int
    """Size of the pool; only whole pages are used."""
    page_tokens: int = 16
    max_running: int = 256
    chunked_prefill_tokens: int | None = 8192
    """None: prompts are never cut."""
    max_prefill_tokens: int = 16384
    ignore_eos: bool = True
    """Requests announce that they run to their limit, as those of our load tools do: all of it is reserved."""
    new_token_ratio: float = 0.7
    least_new_token_ratio: float = 0.098
    ratio_decay_steps: int = 600
    """Decode steps in which the ratio falls from `new_token_ratio` to `least_new_token_ratio`."""
    mixed_chunk: bool = False
    """A batch of prompts has a token for each running request too (--enable-mixed-chunk)."""
    cache_share: bool = False
    """Fair eviction (`core.eviction`) in place of plain LRU, where the policy has shares."""
    progress_steps: int = 40
    """After so many decode steps all running requests report their progress. No more are simulated at once."""
    host_tokens: int = 0
    """Tokens of requests that were taken back which the host's memory holds (`host`); 0: they are computed again."""
    host_token_s: float = 0.0
    """How long the link to the host takes for one token's keys and values."""

    def __post_init__(self) -> None:
        least = self.page_tokens
        chunk_tokens = least if self.chunked_prefill_tokens is None else self.chunked_prefill_tokens
        counts = (
            least,
            self.max_running,
            self.max_prefill_tokens,
            self.ratio_decay_steps,
            self.progress_steps,
        )
        if min(counts) < 1 or self.kv_tokens < least or chunk_tokens < least:
            raise ValueError(
                f"a replica's sizes are at least 1, and its pool and chunks at least a page: {self}"
            )
        if not 0 <= self.least_new_token_ratio <= self.new_token_ratio <= 1:
            raise ValueError("new_token_ratio must lie between least_new_token_ratio and 1")

    @property
    def pages(self) -> int:
        return self.kv_tokens // self.page_tokens

    def pages_of(self, tokens: int) -> int:
        return -(-tokens // self.page_tokens)


class NewTokenRatio:
    """The part of the running requests' possible output that is reserved (SGLang's NewTokenRatioTracker)."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._from = settings.new_token_ratio
        self._steps = 0

    @property
    def now(self) -> float:
        if self._settings.ignore_eos:
            return 1.0
        most, least = self._settings.new_token_ratio, self._settings.least_new_token_ratio
        return max(self._from - self._steps * (most - least) / self._settings.ratio_decay_steps, least)

    def decoded(self, steps: int) -> None:
        """Let the ratio decay by `steps` decode steps without a retraction."""
        self._steps += steps

    def reset(self) -> None:
        """Start again from `new_token_ratio`: the engine is idle."""
        self._from, self._steps = self._settings.new_token_ratio, 0

    def retracted(self, requests: int, output_tokens: int, max_output_tokens: int) -> None:
        """Set the ratio after a retraction by how far the `requests` that are left have come: `output_tokens` of
        `max_output_tokens`. The decode step that follows does not count."""
        expected = output_tokens + RETRACT_STEPS * requests
        self._from, self._steps = min(1.0, expected / (max_output_tokens + 1)), -1


class Budget:
    """What is left for one batch. `room` is the memory at each call, in tokens; locking a prefix reduces it."""

    def __init__(
        self,
        settings: Settings,
        reserved_tokens: float,
        most_tokens: int | None = None,
        decoding: int = 0,
        page_tokens: int = 0,
    ) -> None:
        """`most_tokens`: an upper bound of the chunk size for this batch, in whole pages and at least one.
        `decoding`: running requests that get a token in it, for which `page_tokens` of memory are needed."""
        self._page = settings.page_tokens
        self._reserved = reserved_tokens + decoding + page_tokens
        self._taken = decoding
        self._prompt_left = settings.max_prefill_tokens - decoding
        self._chunk_left = settings.chunked_prefill_tokens
        if self._chunk_left is not None:
            self._chunk_left -= decoding
        if most_tokens is not None:
            most_tokens = max(most_tokens // self._page, 1) * self._page
            self._prompt_left = min(self._prompt_left, most_tokens)
            if self._chunk_left is not None:
                self._chunk_left = min(self._chunk_left, most_tokens)

    def verdict(self, room: int) -> Verdict:
        """Whether another request may be tried at all."""
        if room <= self._reserved or room <= self._taken:
            return Verdict.NO_MEMORY
        if self._prompt_left <= 0 or (self._chunk_left is not None and self._chunk_left <= 0):
            return Verdict.FULL
        return Verdict.GO_ON

    def admit(
        self,
        cached_tokens: int,
        tokens: int,
        output_tokens: int,
        room: int,
        *,
        first: bool,
        cut: bool,
        loaded_tokens: int = 0,
    ) -> int | Verdict:
        """How many tokens of a prompt are taken into the pool, or why it does not fit.

        The prompt has `tokens`, of which the first `cached_tokens` are in the cache, and the next `loaded_tokens` come
        from the host and need no computing. `output_tokens` is its output limit; `first`: the batch is empty; `cut`:
        the prompt may be cut. An engine has one cut prompt at a time.
        """
        extend = tokens - cached_tokens
        needed = extend + min(output_tokens, LONGEST_RESERVATION) + self._page
        if needed >= room - self._reserved:
            return Verdict.NO_MEMORY
        paged = -(-(extend - loaded_tokens) // self._page) * self._page
        if self._chunk_left is None:
            return Verdict.FULL if not first and paged >= self._prompt_left else extend
        if paged <= self._chunk_left:
            return extend
        if not cut or loaded_tokens:
            return Verdict.FULL
        end = (cached_tokens + self._chunk_left // self._page * self._page) // self._page * self._page
        return end - cached_tokens if end > cached_tokens else Verdict.FULL

    def missing(self, cached_tokens: int, tokens: int, output_tokens: int, room: int) -> float:
        """How many more tokens of memory `admit` would have to find; 0 or less: it has room."""
        needed = tokens - cached_tokens + min(output_tokens, LONGEST_RESERVATION) + self._page
        return needed - (room - self._reserved) + 1

    def free(self, reserved_tokens: float) -> None:
        """A running request has left, for which so many were reserved."""
        self._reserved -= reserved_tokens

    @property
    def chunk_tokens(self) -> int:
        """What is left of the chunk size, if prompts may be cut."""
        assert self._chunk_left is not None
        return self._chunk_left

    def next_chunk(self, tokens: int, room: int, most_tokens: int) -> int:
        """How much of the rest of a prompt that was cut before is computed next: always some, as `keep` was called for
        it. At most `most_tokens`, in whole pages, if that is one at least."""
        fits = min(self.chunk_tokens, int(room - self._reserved))
        bound = most_tokens < self.chunk_tokens
        most = (bound and most_tokens // self._page * self._page) or self.chunk_tokens
        return min(tokens, most, room, fits if fits > 0 else self.chunk_tokens)

    def keep(self, rest_tokens: int, output_tokens: int) -> None:
        """The rest of a prompt that was cut is taken for what is tried from here on."""
        paged = -(-rest_tokens // self._page) * self._page
        self._reserved += paged + self._page + min(output_tokens, LONGEST_RESERVATION)
        self._taken += paged

    def take(self, extend_tokens: int, output_tokens: int, loaded_tokens: int = 0) -> None:
        """Subtract what a prompt in the batch takes, `loaded_tokens` of it without being computed. `output_tokens` is 0
        for a prompt that was cut."""
        paged = -(-extend_tokens // self._page) * self._page
        self._reserved += paged + self._page + min(output_tokens, LONGEST_RESERVATION)
        self._taken += paged + self._page
        paged = -(-(extend_tokens - loaded_tokens) // self._page) * self._page
        self._prompt_left -= paged
        if self._chunk_left is not None:
            self._chunk_left -= paged
