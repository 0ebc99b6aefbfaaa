"""How much a prefill batch may take: SGLang's admission rules for memory and compute, without its features.

    room        free pages and cache that nobody holds, in tokens
    reserved    what the running requests may still write: each (most output - output so far), at most
                `LONGEST_RESERVATION`, times a ratio below 1 that bets on early ends; it decays with each decode step
                and is raised after a retraction. Where ends of sequence are ignored the ratio is 1.
    a candidate fits when  extend + most output + a page  <  room - reserved - what the batch has taken
    compute     extend tokens, rounded up to pages, count against the chunk size and `max_prefill_tokens`; a prompt
                that is longer than what is left of the chunk is cut at a page, and is the batch's last

Source: SGLang 0.5.23, `PrefillAdder`, `PrefillBudget`, `NewTokenRatioTracker`.
"""

from dataclasses import dataclass
from enum import Enum, auto

LONGEST_RESERVATION = 4096
"""Output tokens that are reserved for one request at most (SGLang's CLIP_MAX_NEW_TOKENS)."""


class Verdict(Enum):
    """May another request join the batch?"""

    GO_ON = auto()
    NO_MEMORY = auto()
    FULL = auto()
    """The step has as many prompt tokens as it may."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What a replica's server arguments are. ValueError for what cannot be."""

    kv_tokens: int
    """The pool; whole pages of it are used."""
    page_tokens: int = 16
    max_running: int = 256
    chunked_prefill_tokens: int | None = 8192
    """None: prompts are never cut."""
    max_prefill_tokens: int = 16384
    ignore_eos: bool = True
    """Requests run to their limit and say so, as our load tools' do: their whole output is reserved."""
    new_token_ratio: float = 0.7
    least_new_token_ratio: float = 0.098
    ratio_decay_steps: int = 600
    """Decode steps in which the ratio falls from the one to the other."""
    retract_steps: int = 20
    """Decode steps that a retraction makes room for."""
    progress_steps: int = 40
    """All running requests report their progress after so many decode steps, which is also the longest run of
    steps that is taken at once."""

    def __post_init__(self) -> None:
        for name in (
            "page_tokens",
            "max_running",
            "max_prefill_tokens",
            "ratio_decay_steps",
            "progress_steps",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)!r}")
        if self.kv_tokens < self.page_tokens:
            raise ValueError(f"kv_tokens is {self.kv_tokens}: not even one page of {self.page_tokens}")
        if self.chunked_prefill_tokens is not None and self.chunked_prefill_tokens < self.page_tokens:
            raise ValueError(
                f"chunked_prefill_tokens is {self.chunked_prefill_tokens}: less than a page of {self.page_tokens}"
            )
        if not 0 <= self.least_new_token_ratio <= self.new_token_ratio <= 1:
            raise ValueError("new_token_ratio must lie between least_new_token_ratio and 1")

    @property
    def pages(self) -> int:
        return self.kv_tokens // self.page_tokens

    def pages_of(self, tokens: int) -> int:
        """Pages that so many tokens in a row take."""
        return -(-tokens // self.page_tokens)


class NewTokenRatio:
    """The part of the running requests' possible output that is reserved."""

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
        """So many decode steps went by without a retraction."""
        self._steps += steps

    def reset(self) -> None:
        """The engine is idle."""
        self._from, self._steps = self._settings.new_token_ratio, 0

    def retracted(self, requests: int, output_tokens: int, max_output_tokens: int) -> None:
        """After a retraction so many requests run, with that much output of that much they may make. The decode step
        that follows does not count."""
        expected = output_tokens + self._settings.retract_steps * requests
        self._from, self._steps = min(1.0, expected / (max_output_tokens + 1)), -1


class Budget:
    """What is left for one batch. `room` in each call is what memory there is then: a lock takes some of it."""

    def __init__(self, settings: Settings, reserved_tokens: float) -> None:
        self._page = settings.page_tokens
        self._reserved = reserved_tokens
        self._taken = 0
        self._prompt_left = settings.max_prefill_tokens
        self._chunk_left = settings.chunked_prefill_tokens

    def verdict(self, room: int) -> Verdict:
        """For whoever comes next."""
        if room <= self._reserved or room <= self._taken:
            return Verdict.NO_MEMORY
        if self._prompt_left <= 0 or (self._chunk_left is not None and self._chunk_left <= 0):
            return Verdict.FULL
        return Verdict.GO_ON

    def admit(
        self, cached_tokens: int, tokens: int, output_tokens: int, room: int, *, first: bool
    ) -> int | Verdict:
        """How much of a prompt of `tokens`, the head of which is cached, is computed; or why nothing.

        `output_tokens` is what it may make; `first`: nothing is in the batch yet.
        """
        extend = tokens - cached_tokens
        needed = extend + min(output_tokens, LONGEST_RESERVATION) + self._page
        if needed >= room - self._reserved:
            return Verdict.NO_MEMORY
        paged = -(-extend // self._page) * self._page
        if self._chunk_left is None:
            return Verdict.FULL if not first and paged >= self._prompt_left else extend
        if paged <= self._chunk_left:
            return extend
        end = (cached_tokens + self._chunk_left // self._page * self._page) // self._page * self._page
        return end - cached_tokens if end > cached_tokens else Verdict.FULL

    def go_on(self, tokens: int, room: int) -> int:
        """How much of the rest of a prompt, which was cut before, is computed. It always gets some."""
        assert self._chunk_left is not None
        fits = min(self._chunk_left, int(room - self._reserved))
        return min(tokens, fits if fits > 0 else self._chunk_left)

    def take(self, extend_tokens: int, output_tokens: int) -> None:
        """So much is in the batch. `output_tokens` is 0 for a prompt that was cut."""
        paged = -(-extend_tokens // self._page) * self._page
        self._reserved += paged + self._page + min(output_tokens, LONGEST_RESERVATION)
        self._taken += paged + self._page
        self._prompt_left -= paged
        if self._chunk_left is not None:
            self._chunk_left -= paged
