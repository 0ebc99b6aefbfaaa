"""The requests in flight: each is part of its worker's load and holds its prompt in the tree, until it ends once."""

from collections import Counter, deque
from dataclasses import dataclass, field

import msgspec

from router.events import Done
from router.placement.contract import Ended, Placement, Request
from router.radix import Hold, Match, RadixTree
from router.record import PlacementRecord
from router.suspects import Suspects
from router.throttling import Throttling
from router.workers import Worker, WorkerTable


@dataclass(slots=True, eq=False)
class State:
    """What the handlers of all events share."""

    placement: Placement
    """Of the first model."""
    workers: WorkerTable
    tree: RadixTree
    throttling: Throttling
    suspects: Suspects
    record: PlacementRecord = field(default_factory=PlacementRecord)
    counts: Counter[str] = field(default_factory=Counter)


class Flight(msgspec.Struct, eq=False):
    """A request in flight at `worker`, for the gateway `peer`.

    `prefill_tokens` and `decode_tokens` are the work that is left; they are part of the worker's load.
    """

    request: Request
    worker: Worker
    peer: bytes
    matched_tokens: int
    hold: Hold
    prefill_tokens: int = 0
    decode_tokens: float = 0.0
    output_tokens: int = 0
    overrun_tokens: int = 0
    """Beyond what was expected."""
    placed_s: float = 0.0
    is_cut: bool = False
    """Its gateway was told to cut it off."""

    def produce(self, output_tokens: int) -> None:
        """`output_tokens` have been produced so far, so the prefill is over. Late reports of less are ignored."""
        if output_tokens > self.output_tokens:
            self.worker.produced_tokens += output_tokens - self.output_tokens
            self.worker.prefilled_tokens += self.prefill_tokens
            self.output_tokens = output_tokens
            self._leave(max(1.0, self.request.expected_output_tokens - output_tokens))
            if (more := output_tokens - int(self.request.expected_output_tokens)) > self.overrun_tokens:
                self.worker.overrun_tokens += more - self.overrun_tokens
                self.overrun_tokens = more

    def end(self, output_tokens: int = 0) -> None:
        """Takes the request off its worker's load. So many output tokens were produced in all, or as many as were
        reported before, if that is more."""
        worker = self.worker
        if output_tokens > self.output_tokens:
            worker.produced_tokens += output_tokens - self.output_tokens
            worker.prefilled_tokens += self.prefill_tokens
        if self.overrun_tokens:
            worker.overrun_tokens -= self.overrun_tokens
        self._leave(0.0)
        worker.count(-1)

    def _leave(self, decode_tokens: float) -> None:
        worker = self.worker
        worker.prefill_tokens -= self.prefill_tokens
        worker.decode_tokens += decode_tokens - self.decode_tokens
        self.prefill_tokens, self.decode_tokens = 0, decode_tokens


class Flights:
    """All requests in flight. If one ends before its worker's KV events have confirmed its prefix, the prefix is taken
    to be cached for `linger_s` more."""

    def __init__(self, state: State, linger_s: float) -> None:
        """ValueError if `linger_s` is negative."""
        if not linger_s >= 0:
            raise ValueError(f"linger_s is {linger_s}: it cannot be negative")
        self.by_id: dict[str, Flight] = {}
        self.lingering: deque[tuple[float, Hold]] = deque()
        self._tree, self._throttling, self._suspects = state.tree, state.throttling, state.suspects
        self._record, self._counts, self._linger_s = state.record, state.counts, linger_s

    def settle(self, now_s: float) -> None:
        while self.lingering and self.lingering[0][0] <= now_s:
            self._tree.release(self.lingering.popleft()[1])

    def begin(self, request: Request, worker: Worker, match: Match, peer: bytes, now_s: float) -> Flight:
        name, input_tokens, decode_tokens = worker.name, request.input_tokens, request.expected_output_tokens
        worker.pool.placement.placed(request, name, match, now_s)
        hold = self._tree.hold(name, request.tokens, request.namespace, match)
        matched_tokens = match.lengths.get(name, 0)
        prefill_tokens = input_tokens - matched_tokens
        flight = self.by_id[request.id] = Flight(
            request, worker, peer, matched_tokens, hold, prefill_tokens, decode_tokens, placed_s=now_s
        )
        if self._suspects.trials:
            self._suspects.placed(request.id, name)
        worker.prefill_tokens += prefill_tokens
        worker.decode_tokens += decode_tokens
        worker.dispatched += 1
        worker.dispatched_tokens += input_tokens
        worker.count(1)
        return flight

    def end(self, flight: Flight, done: Done, now_s: float) -> None:
        """Takes a request out of flight. Nothing else does."""
        request, worker, counts, outcome = flight.request, flight.worker, self._counts, done.outcome
        del self.by_id[request.id]
        flight.end(done.output_tokens)
        self._throttling.ended(request.id, now_s, is_served=outcome == "ok")
        self._record.ended(request.id, outcome, done.cached_tokens)
        if outcome == "failed":
            self._tree.release(flight.hold, served=False)
        elif self._linger_s and worker.up.kv is not None and not self._tree.is_confirmed(flight.hold):
            self.lingering.append((now_s + self._linger_s, flight.hold))
        else:
            self._tree.release(flight.hold)
        output_tokens = max(flight.output_tokens, done.output_tokens)
        if outcome == "ok":
            self._suspects.served(request.client)
            worker.pool.outputs.learn(request.client, output_tokens)
        counts[f"ended {outcome}"] += 1
        counts["output_tokens"] += output_tokens
        if done.cached_tokens is not None:
            counts["measured_input_tokens"] += request.input_tokens
            counts["measured_predicted_tokens"] += flight.matched_tokens
            counts["measured_cached_tokens"] += done.cached_tokens
        worker.pool.placement.done(
            Ended(
                request, worker.name, flight.matched_tokens, output_tokens, outcome, done.ttft_s, done.tpot_s
            ),
            now_s,
        )

    def fail_all(self, worker: Worker, now_s: float) -> int:
        """Ends what is in flight at `worker` as failed. The gateways still report the ends; those are ignored."""
        lost = [flight for flight in self.by_id.values() if flight.worker is worker]
        for flight in lost:
            self.end(flight, Done(flight.request.id, outcome="failed"), now_s)
        return len(lost)

    def of_peer(self, peer: bytes) -> list[Flight]:
        return [flight for flight in self.by_id.values() if flight.peer == peer]
