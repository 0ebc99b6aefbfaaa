"""Memory of the host beside a GPU: keys and values of requests that were taken back wait there.

One link carries them both ways, one copy after the other, while the GPU computes. A copy out begins when its request
is taken back; its pages are free in the books at once, and a step waits only if it needs them before they have left. A
copy in begins with the step that admits the request again, which lasts at least as long.

    room    whole contexts only: a request that does not fit is not kept, and its prompt and output are computed again
"""

from collections import deque

HOST_BYTES_PER_S = 25e9
"""One way over PCIe 4.0 with 16 lanes, as copies of keys and values reach it."""


class HostPool:
    """At most `tokens` of contexts, each of which takes `token_s` on the link."""

    def __init__(self, tokens: int = 0, token_s: float = 0.0) -> None:
        if tokens < 0 or token_s < 0:
            raise ValueError("a host's pool and its link's time for a token cannot be negative")
        self.tokens = tokens
        self.used_tokens = 0
        self._token_s = token_s
        self._kept: dict[str, int] = {}
        self._free_s = 0.0
        """When the link has carried all."""
        self._leaving: deque[tuple[float, int]] = deque()
        """When each copy out ends, and its tokens."""

    def keep(self, request_id: str, tokens: int, now_s: float) -> bool:
        """Copy a context out from `now_s` on. Whether there was room."""
        if tokens <= 0 or self.used_tokens + tokens > self.tokens:
            return False
        self.drop(request_id)
        self._kept[request_id] = tokens
        self.used_tokens += tokens
        self._free_s = max(self._free_s, now_s) + tokens * self._token_s
        self._leaving.append((self._free_s, tokens))
        return True

    def of(self, request_id: str) -> int:
        """Tokens that are kept of a request."""
        return self._kept.get(request_id, 0)

    def drop(self, request_id: str) -> None:
        """They are of no use any more."""
        self.used_tokens -= self._kept.pop(request_id, 0)

    def load_s(self, tokens: int, now_s: float) -> float:
        """How long it takes from `now_s` until so many tokens are on the GPU again."""
        self._free_s = max(self._free_s, now_s) + tokens * self._token_s
        return self._free_s - now_s

    def wait_s(self, room_tokens: int, now_s: float) -> float:
        """How long a step waits that leaves `room_tokens` of the GPU's memory unused: until what has not left fits
        there."""
        while self._leaving and self._leaving[0][0] <= now_s:
            self._leaving.popleft()
        outside = sum(tokens for _, tokens in self._leaving)
        wait_s = 0.0
        for ends_s, tokens in self._leaving:
            if outside <= room_tokens:
                break
            outside -= tokens
            wait_s = ends_s - now_s
        return wait_s
