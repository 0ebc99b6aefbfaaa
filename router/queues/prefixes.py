"""How much of the prefixes of those that wait each worker was found to hold. Kept while anybody waits who has one."""

from collections.abc import Hashable, Mapping

from router.queues.line import Queued


class Prefixes:
    """Bounded by the requests that wait."""

    def __init__(self) -> None:
        self._held: dict[Hashable, dict[str, int]] = {}
        self._counts: dict[Hashable, int] = {}

    def follow(self, queued: Queued, lengths: Mapping[str, int]) -> None:
        """One more waits with this prefix. `lengths`: how much of its prompt each worker holds."""
        if queued.prefix is None:
            return
        self._counts[queued.prefix] = self._counts.get(queued.prefix, 0) + 1
        held = self._held.setdefault(queued.prefix, {})
        for worker, tokens in lengths.items():
            held[worker] = min(tokens, queued.prefix_tokens)

    def unfollow(self, queued: Queued) -> None:
        """It waits no more."""
        count = self._counts.pop(queued.prefix, 0)
        if count > 1:
            self._counts[queued.prefix] = count - 1
        else:
            self._held.pop(queued.prefix, None)

    def sent(self, worker: str, prefix: Hashable | None, tokens: int) -> None:
        """A request with this prefix went to a worker, which holds it from then on."""
        held = self._held.get(prefix) if self._held else None
        if held is not None:
            held[worker] = tokens

    def worker_down(self, worker: str) -> None:
        """It holds nothing any more."""
        for held in self._held.values():
            held.pop(worker, None)

    def held(self, prefix: Hashable) -> Mapping[str, int]:
        """How many tokens of a prefix each worker holds."""
        return self._held.get(prefix, {})
