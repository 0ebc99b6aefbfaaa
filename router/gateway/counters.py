"""What a gateway process counts, for `GET /status`."""

from collections import Counter


class Counters:
    """Requests by what became of them, and refusals by HTTP status."""

    def __init__(self) -> None:
        self.refusals: Counter[int] = Counter()
        self.ignored_headers: Counter[str] = Counter()
        """Headers that name a client and came from elsewhere than a trusted proxy, by name."""
        self.requests = 0
        self.retried = 0
        """Attempts after one that failed before the client had anything."""
        self.resumed = 0
        """Streams that went on from another replica."""
        self.placed_in_fallback = 0
        self.failed = 0
        self.left = 0
        """Clients that left before their answer was complete."""
        self.refused = 0

    def state(self) -> dict[str, object]:
        """As `/status` shows them."""
        return {
            "refusals": {str(status): count for status, count in sorted(self.refusals.items())},
            "ignored headers": dict(sorted(self.ignored_headers.items())),
            "requests": self.requests,
            "retried": self.retried,
            "resumed": self.resumed,
            "placed in fallback": self.placed_in_fallback,
            "failed": self.failed,
            "left": self.left,
            "refused": self.refused,
        }
