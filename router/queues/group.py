"""A group: requests that are planned as one, and what is known of those of them that wait."""

from bisect import bisect_left, insort
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from router.queues.heads import Heads, Place, Urgency
from router.queues.line import Key, Line, Queued
from router.queues.problem import is_bound


class Kind(NamedTuple):
    """What the requests of a group have in common. `lengths` is the number of its centre among those numbered
    `centres`."""

    model: str
    slo_class: str
    tier: int
    centres: int = 0
    lengths: int = 0
    exclude: tuple[str, ...] = ()
    late: bool = False
    """Their deadlines are missed."""

    @property
    def rank(self) -> int:
        """Who goes before whom: within their share before ahead of it; in time before late."""
        return 2 * self.tier + self.late


@dataclass(slots=True, eq=False)
class Group:
    """Requests that are planned as one; the sums are of those that wait."""

    number: int
    kind: Kind
    since: Key
    """Requests of its kind from this key on are its own, up to the next group's."""
    line: Line
    prompt_tokens: int = 0
    output_tokens: float = 0.0
    output_variance: float = 0.0
    running: int = 0
    joined: int = 0
    """How many have waited here so far."""
    begun_on: str | None = None
    place: Place = field(init=False)
    urgency: Urgency = field(init=False)
    """While anybody waits, as `rank` has set it."""
    queue: "Heads[Group] | None" = None
    """The groups with somebody waiting of the queue that it stands in."""
    deadlines: list[float] = field(default_factory=list)
    """Of those that wait, the earliest first. Not to be written to."""
    _shared: dict[Hashable, tuple[int, int]] = field(default_factory=dict)
    """Prefix -> how many of those that wait have it, and its tokens."""

    def __post_init__(self) -> None:
        self.place = self.kind.model, self.kind.rank

    @property
    def is_bound(self) -> bool:
        return is_bound(self.kind.tier, self.begun_on)

    @property
    def deadline_s(self) -> float:
        """The earliest of those that wait. IndexError if nobody does."""
        return self.deadlines[0]

    @property
    def urgent_s(self) -> float:
        """What it is served by: its deadline; since when the first has waited, if they are late."""
        return self.line.first().since_s if self.kind.late else self.deadlines[0]

    def rank(self, everywhere: "Heads[Group]") -> None:
        """To be called whenever somebody has come or gone: its urgency follows, and its place in its queue and among
        all groups."""
        kind = self.kind
        if self.deadlines:
            self.urgency = kind.tier, kind.late, self.urgent_s, self.number
        for heads in (everywhere, self.queue):
            if heads is not None and self.deadlines:
                heads.put(self, self.place, self.urgency)
            elif heads is not None:
                heads.drop(self, self.place)

    def stand(self, queue: "Heads[Group] | None") -> None:
        """It stands in this queue from now on; None: in none."""
        if self.queue is queue:
            return
        if self.queue is not None:
            self.queue.drop(self, self.place)
        self.queue = queue
        if queue is not None and self.deadlines:
            queue.put(self, self.place, self.urgency)

    @property
    def span_s(self) -> tuple[float, float]:
        """`urgent_s` of the first and of the last in line."""
        if self.kind.late:
            return self.line.first().since_s, self.line.last().since_s
        return self.deadlines[0], self.deadlines[-1]

    def is_in_danger(self, now_s: float, part: float) -> bool:
        """Whether its first has less than this part of its time left; not if it is late already."""
        first = self.line.first()
        return not self.kind.late and self.deadline_s - now_s < part * (first.deadline_s - first.since_s)

    def promised(self) -> tuple[float, float]:
        """Within how long those in line should have begun of whom that is shortest, and which part of all was promised
        that or twice as long. O(size). ValueError if nobody waits."""
        spans = [max(0.0, one.request.deadline_s - one.request.since_s) for one in self.line]
        shortest = min(spans)
        return shortest, sum(span <= 2 * shortest for span in spans) / len(spans)

    @property
    def last_deadline_s(self) -> float:
        """Of the last in line."""
        return self.line.last().deadline_s

    def uncached_tokens(self, held: Callable[[Hashable], Mapping[str, int]]) -> tuple[int, dict[str, int]]:
        """Prompt tokens that a worker computes for those that wait: of a prefix that several share, once what it does
        not hold. `held`: how many tokens of a prefix each worker holds. Returns what it is at a worker that holds
        nothing, and how much less at those that hold something. O(prefixes)."""
        tokens, saved = self.prompt_tokens, dict[str, int]()
        for prefix, (count, shared) in self._shared.items():
            tokens -= (count - 1) * shared
            for worker, length in held(prefix).items():
                saved[worker] = saved.get(worker, 0) + min(shared, length)
        return tokens, saved

    def count(self, request: Queued, sign: int) -> None:
        """One of them waits from now on (1), or does not (-1); the line has it or not already."""
        self.prompt_tokens += sign * request.prompt_tokens
        self.output_tokens += sign * request.expected_output_tokens
        self.output_variance += sign * request.output_variance
        if not self.line:  # drop what rounding has left over
            self.output_tokens = self.output_variance = 0.0
        if sign > 0:
            insort(self.deadlines, request.deadline_s)
            if request.prefix is not None:
                self._share(request)
            return
        del self.deadlines[bisect_left(self.deadlines, request.deadline_s)]
        if request.prefix is not None:
            count, tokens = self._shared.pop(request.prefix)
            if count > 1:
                self._shared[request.prefix] = count - 1, tokens

    def recount(self) -> None:
        """All sums anew: half of those who waited are in another group."""
        requests = [entry.request for entry in self.line]
        self.prompt_tokens = sum(one.prompt_tokens for one in requests)
        self.output_tokens = sum(one.expected_output_tokens for one in requests)
        self.output_variance = sum(one.output_variance for one in requests)
        self.deadlines = sorted(one.deadline_s for one in requests)
        self._shared = {}
        for one in requests:
            if one.prefix is not None:
                self._share(one)

    def _share(self, request: Queued) -> None:
        """One more has its prefix."""
        own = min(request.prefix_tokens, request.prompt_tokens)
        count, tokens = self._shared.get(request.prefix, (0, own))
        self._shared[request.prefix] = count + 1, min(tokens, own)

    def __len__(self) -> int:
        """How many wait."""
        return len(self.deadlines)
