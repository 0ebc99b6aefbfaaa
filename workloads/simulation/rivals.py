"""What others have published, each as small as its paper allows, to stand beside our placements and policies. Pure.

None of it is offered; `beyond-frontier` has the numbers.

dualmap     (arXiv 2602.06502) two hashes of a prompt's prefix name two candidates. The one with more of the prompt
            cached gets it if its first token is to come within `slo_s` there, else the one where it comes first. A
            prefix with which too many prompts begin is made longer. Without the paper's migration of requests that wait
klpm        (arXiv 2502.04677) of `k` requests one is the oldest, the others have the longest cached prefix
klpm-fair   the same within each client of DLPM
justitia    (arXiv 2510.17015) DLPM whose clients have their programs served in the order in which they would end if all
            of them were served at once and equally: the least V + cost first, V the client's virtual time as a program
            begins. V passes as the client is served, divided by the programs that would be under way. A cost is what
            the client's programs cost so far, by the length of their first prompts
TailLru     (arXiv 2510.15152) evicts first what the next turn of a conversation may compute again within the budget of
            its first token: the last `tail_tokens` of each; then the least recently used
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any, ClassVar
from zlib import crc32

from router.events import TOKEN_BYTES
from router.placement.contract import Placement, Request, WorkerView, least
from router.radix import Match
from sglang_fair.common.weights import Weights
from sglang_fair.core.clients import PATIENCE, ClientQueues
from sglang_fair.core.dlpm import Dlpm
from sglang_fair.core.eviction import LeafOrder, LeastRecentlyUsed, Piece
from sglang_fair.core.fcfs import Lpm, longest_prefix
from sglang_fair.core.heap import LazyHeap
from sglang_fair.core.job import Job
from sglang_fair.core.options import SHIPPED, parse
from sglang_fair.core.policy import Policy
from sglang_fair.sim.cache import Node

BLOCK_TOKENS = 512
"""By so many DualMap makes a prefix longer; of 16, 64 and 512 it has the most throughput with this."""
COUNTED, FEW = 4096, 16
"""After so many requests its counts are halved; a prefix of fewer than `FEW` is not too frequent."""
K = 4
"""Of k-LPM."""
BORROW = float(parse(Dlpm.name, SHIPPED[Dlpm.name])["borrow"])
"""Of DLPM, as it ships."""


@dataclass
class DualMap(Placement):
    """`tokens_per_s` is how fast a replica computes prompts; the default is an A100's with Llama-3.1-8B."""

    uses_progress: ClassVar[bool] = False

    slo_s: float = 5.0
    tokens_per_s: float = 13_000.0

    _counts: dict[int, int] = field(default_factory=dict, init=False, repr=False)
    _seen: int = field(default=0, init=False, repr=False)

    def place(self, request: Request, match: Match, workers: Sequence[WorkerView], now_s: float) -> str:
        pair = self._candidates(request, workers)
        tokens = [one.prefill_tokens + request.input_tokens - match.of(one.name) for one in pair]
        waits_s = [
            count / (self.tokens_per_s * one.capacity) for one, count in zip(pair, tokens, strict=True)
        ]
        near = max(range(len(pair)), key=lambda k: (match.of(pair[k].name), -waits_s[k]))
        return pair[near].name if waits_s[near] <= self.slo_s else least(pair, waits_s).name

    def _candidates(self, request: Request, workers: Sequence[WorkerView]) -> list[WorkerView]:
        key, number = self._key(request, len(workers)), len(workers)
        first = crc32(b"first", key) % number
        if number == 1:
            return [workers[first]]
        return [workers[first], workers[(first + 1 + crc32(b"second", key) % (number - 1)) % number]]

    def _key(self, request: Request, workers: int) -> int:
        """Of the shortest prefix with which no more than two workers' part of all prompts begin."""
        self._seen += 1
        if self._seen > COUNTED:
            self._seen //= 2
            self._counts = {key: count // 2 for key, count in self._counts.items() if count > 1}
        key, step = 0, BLOCK_TOKENS * TOKEN_BYTES
        # Whole blocks, which later turns have too.
        for at in range(0, max(1, len(request.tokens) - step + 1), step):
            key = crc32(request.tokens[at : at + step], key)
            self._counts[key] = count = self._counts.get(key, 0) + 1
            if count < FEW or count * workers <= 2 * self._seen:
                break
        return key


@dataclass
class KLpm(Lpm):
    name: ClassVar[str] = "klpm"

    _oldest: LazyHeap[Job] = field(default_factory=LazyHeap, init=False, repr=False)
    _left: int = field(default=0, init=False, repr=False)
    """Requests so far."""

    def arrive(self, job: Job) -> None:
        super().arrive(job)
        self._oldest.put(job, job.arrival)

    def leave(self, job: Job) -> None:
        self._left += 1
        super().leave(job)
        self._oldest.discard(job)

    def hold(self, job: Job) -> None:
        super().hold(job)
        self._oldest.discard(job)

    def release(self) -> None:
        for job in self._held:
            self._oldest.put(job, job.arrival)
        super().release()

    def pick(self) -> Job | None:
        return super().pick() if (self._left + 1) % K else self._oldest.first()


class _KQueues(ClientQueues):
    """Each client's order is k-LPM."""

    def __init__(self) -> None:
        super().__init__(longest_prefix)
        self._left: dict[str, int] = {}

    def leave(self, job: Job) -> None:
        self._left[job.client] = self._left.get(job.client, 0) + 1
        super().leave(job)

    def head(self, client: str) -> Job | None:
        found = super().head(client)
        if found is None or (self._left.get(client, 0) + 1) % K:
            return found
        queue = self._queue(found)
        return next(job for job in queue.numbers if job not in queue.held)


@dataclass
class KLpmFair(Dlpm):
    name: ClassVar[str] = "klpm-fair"
    borrow: float = BORROW

    def __post_init__(self) -> None:
        super().__post_init__()
        self._queues = _KQueues()


@dataclass(slots=True)
class _Programs:
    """Of one client, by their names."""

    ends: dict[str, float] = field(default_factory=dict)
    now: float = 0.0
    """V."""
    under_way: list[float] = field(default_factory=list)
    """Ends of those that would not have ended by now, as a heap."""
    units: float = 0.0
    prompt_tokens: int = 0

    def begin(self, name: str, prompt_tokens: int) -> None:
        self.prompt_tokens += prompt_tokens
        price = self.units / self.prompt_tokens if self.units else 1.0
        self.ends[name] = end = self.now + price * prompt_tokens
        heappush(self.under_way, end)

    def serve(self, units: float) -> None:
        self.units += units
        while self.under_way:
            until_next = (self.under_way[0] - self.now) * len(self.under_way)
            if until_next > units:
                self.now += units / len(self.under_way)
                return
            units -= until_next
            self.now = heappop(self.under_way)


@dataclass
class Justitia(Dlpm):
    name: ClassVar[str] = "justitia"
    borrow: float = BORROW

    _programs: dict[str, _Programs] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._queues = ClientQueues(self._by_end, PATIENCE)

    def arrive(self, job: Job) -> None:
        programs = self._programs.setdefault(job.client, _Programs())
        if job.interaction not in programs.ends:
            programs.begin(job.interaction, job.prompt_tokens)
        super().arrive(job)

    def charge(self, client: str, units: float) -> None:
        if client in self._programs:
            self._programs[client].serve(units)
        super().charge(client, units)

    def _by_end(self, job: Job) -> Any:
        return (self._programs[job.client].ends[job.interaction], *longest_prefix(job))


class TailLru(LeastRecentlyUsed):
    def __init__(self, tail_tokens: int) -> None:
        super().__init__()
        self._tail_tokens = tail_tokens
        self._spare: LeafOrder = LazyHeap()
        self._ended: dict[Piece, int] = {}
        """Where the longest conversation ended that went on behind this piece, of which it is what is left."""

    def add(self, piece: Piece) -> None:
        assert isinstance(piece, Node)
        self.forget(piece)
        is_spare = max(piece.end, self._ended.get(piece, 0)) - piece.start <= self._tail_tokens
        self._put(piece, self._spare if is_spare else self._leaves)

    def take(self) -> Piece | None:
        piece = self._oldest(self._spare) or self._oldest(self._leaves)
        if piece is None:
            return None
        assert isinstance(piece, Node)
        assert piece.parent is not None
        self.forget(piece)
        ended = max(piece.end, self._ended.pop(piece, 0))
        self._ended[piece.parent] = max(ended, self._ended.get(piece.parent, 0))
        return piece

    def divided(self, upper: Piece, lower: Piece) -> None:
        if lower.leaves is not None:
            self.add(lower)


RIVALS: Mapping[str, Callable[[float, Weights], Policy]] = {
    KLpm.name: lambda quantum, weights: KLpm(),
    KLpmFair.name: KLpmFair,
    Justitia.name: Justitia,
}
"""The policies, of quantum and weights."""
