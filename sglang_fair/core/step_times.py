"""What is learnt of how long the steps of an engine take."""

from collections import deque
from statistics import median

USUAL_OF = 9
"""The usual length of a decode step is the median of so many: the first of a kind may compile something."""

LEAST_CHUNK_TOKENS = 128
"""Smaller chunks do not shorten a step by much: reading the weights takes as long."""

FIRST_CHUNK_TOKENS = 2048
"""The bound of a chunk before any step was measured."""


class Chunks:
    """How many prompt tokens a step may have so that it lasts no longer than it may, learnt from the steps."""

    def __init__(self) -> None:
        self.tokens = float(FIRST_CHUNK_TOKENS)

    def learn(self, tokens: int, duration_s: float, most_s: float) -> None:
        """At once if a step took longer than `most_s`, otherwise by those that are nearly as large: a small one says
        little about a large one's time per token. One that no bound would have made shorter halves it at most: else
        short prompts that take long (an image) would make everybody's steps short."""
        if not duration_s:
            return
        fits = tokens * most_s / duration_s
        if tokens <= LEAST_CHUNK_TOKENS:
            fits = max(fits, self.tokens / 2)
        if duration_s > most_s or 2 * tokens >= self.tokens:
            self.tokens = max(LEAST_CHUNK_TOKENS, min(fits, 2 * self.tokens))


class TokenTimes:
    """How long a token takes those that run, lately, and a decode step for one request alone."""

    def __init__(self) -> None:
        self.solo_s = 0.0
        """A decode step for one request: the least of the usual lengths. 0: not known."""
        self.between_s = 0.0
        """Since the last decode step, for prompts of clients above their share."""
        self.recent = 0.0, 0.0
        """The requests in a decode step and the time of a token."""
        self._lengths: dict[int, deque[float]] = {}
        """Of decode steps, the last ones, by the size of the batch in bits."""
        self._usual_s: dict[int, float] = {}

    def gave(self, decoding: int, duration_s: float, steps: int) -> None:
        """The requests that decode got so many tokens each, for which `duration_s` was needed."""
        if decoding:
            (requests, token_s), part = self.recent, 1 - 0.9**steps if self.recent[0] else 1.0
            self.recent = (
                requests + (decoding - requests) * part,
                token_s + ((duration_s + self.between_s) / steps - token_s) * part,
            )
        self.between_s = 0.0

    def measure(self, duration_s: float, steps: int, requests: int) -> None:
        """What decode steps for so many requests took."""
        size = requests.bit_length()
        lengths = self._lengths.setdefault(size, deque(maxlen=USUAL_OF))
        lengths.extend([duration_s / steps] * min(steps, USUAL_OF))
        self._usual_s[size] = median(lengths)
        self.solo_s = min(self._usual_s.values())

    def usual_s(self, requests: int) -> float:
        """What a decode step for about so many requests takes; 0 if none was measured."""
        return self._usual_s.get(requests.bit_length(), 0.0)

    def expected_s(self, requests: int) -> float:
        """How long a token is expected to take beside so many requests; 0 before any was measured."""
        recent_requests, recent_s = self.recent
        return recent_s * max(1.0, requests / recent_requests) if recent_requests else 0.0
