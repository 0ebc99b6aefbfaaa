"""The latest requests of a gateway process: whose they are, what was tried, what it came to. No text of a request or an
answer is in it.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from router.events import Place
from sglang_fair.common.deadlines import Promise
from sglang_fair.common.ids import new_id
from sglang_fair.common.record import MOST_ENDED, MOST_NAME, Recent

REQUEST_ID = "x-request-id"
"""The header in which a client names its request, and every answer too."""


def own_name(given: str | None) -> str:
    """What a request is called: by its client, in `x-request-id`, if that can stand in a header and in a log, else a
    name of ours."""
    if given and len(given) <= MOST_NAME and given.isascii() and given.isprintable() and " " not in given:
        return given
    return new_id()


@dataclass(slots=True)
class Try:
    """One attempt at a replica, or at getting one. Times are monotonic."""

    id: str
    asked_s: float
    worker: str = ""
    placed_s: float | None = None
    first_s: float | None = None
    """The first piece of the answer."""
    ended_s: float | None = None
    matched_tokens: int = 0
    is_fallback: bool = False
    """No router answered; the gateway placed it by itself."""
    outcome: str = ""
    reason: str = ""

    def shown(self, now_s: float) -> dict[str, Any]:
        placed_s = now_s if self.placed_s is None else self.placed_s
        return {
            "id": self.id,
            "worker": self.worker,
            "matched_tokens": self.matched_tokens,
            "fallback": self.is_fallback,
            "router_wait_s": placed_s - self.asked_s,
            "replica_wait_s": None if self.first_s is None else self.first_s - placed_s,
            "outcome": self.outcome or None,
            "reason": self.reason,
        }


@dataclass(slots=True, eq=False)
class Exchange:
    """One request of a client: filled as things happen, and read at its end by the log, metrics, counts and spans."""

    name: str
    kind: str
    came_s: float
    came_at_s: float
    """By the machine's clock."""
    client: str = "-"
    is_tenant: bool = False
    model: str = ""
    """As its client names it."""
    served_model: str | None = None
    """Which of the served ones that is; None: that is not known."""
    tries: list[Try] = field(default_factory=list)
    status: int | None = None
    error: str = ""
    """Code and text of what it was refused or failed for."""
    outcome: str = ""
    resumed: int = 0
    input_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int = 0
    ended_s: float | None = None
    answered_s: float | None = None
    """When its client got the first piece of an answer that is no error."""
    is_entered: bool = False
    """Its client may ask."""
    trace: str = ""
    """Its trace, where there are spans of it."""
    promise: Promise | None = None
    """By when its first token was due; None: it did not come so far."""
    attained: str = ""
    """Of that, once it has ended (`common.deadlines`)."""

    @property
    def first_s(self) -> float | None:
        """When the first piece of a streamed answer came."""
        return next((one.first_s for one in self.tries if one.first_s is not None), None)

    def failed(self, status: int, error: str) -> None:
        """It is refused, or ends in an error."""
        self.status, self.error = status, error

    def shown(self, now_s: float) -> dict[str, Any]:
        until_s = now_s if self.ended_s is None else self.ended_s
        first_s = self.first_s
        return {
            "request": self.name,
            "kind": self.kind,
            "client": self.client,
            "model": self.model,
            "came_at_s": self.came_at_s,
            "outcome": self.outcome or None,
            "status": self.status,
            "error": self.error,
            "retries": max(0, len(self.tries) - 1 - self.resumed),
            "resumes": self.resumed,
            "fallback": any(one.is_fallback for one in self.tries),
            "ttft_s": None if first_s is None else first_s - self.came_s,
            "duration_s": until_s - self.came_s,
            "tokens": {
                "input": self.input_tokens,
                "cached": self.cached_tokens,
                "output": self.output_tokens,
            },
            "slo": None
            if (promise := self.promise) is None
            else {
                "class": promise.slo_class,
                "slo_s": promise.slo_s,
                "due_s": promise.due_s - self.came_s,  # from its arrival; less than slo_s for a later call
                "attained": self.attained or None,
            },
            "tries": [one.shown(now_s) for one in self.tries],
            **({"trace_id": self.trace} if self.trace else {}),
        }

    def row(self, now_s: float) -> dict[str, Any]:
        """The same for a list of many. Seconds are until the first piece of the answer."""
        last = self.tries[-1] if self.tries else None
        first_s = self.first_s
        until_s = next(time_s for time_s in (first_s, self.ended_s, now_s) if time_s is not None)
        return {
            "id": self.name,
            "client": self.client,
            "replica": "" if last is None else last.worker,
            "arrived": self.came_at_s,
            "state": self.outcome or ("waiting" if first_s is None else "running"),
            "waited_s": until_s - self.came_s,
            "prompt_tokens": self.input_tokens,
            "cached_tokens": self.cached_tokens,
            "output_tokens": self.output_tokens,
            "model": self.model,
            "slo_class": "" if self.promise is None else self.promise.slo_class,
        }

    def line(self) -> dict[str, Any]:
        """The same for a log: one flat object."""
        last = self.tries[-1] if self.tries else None
        shown = self.shown(self.ended_s or self.came_s)
        placed_s = None if last is None else last.placed_s
        first_s = None if last is None else last.first_s
        return {
            "request": self.name,
            "id": "" if last is None else last.id,
            "client": self.client,
            "model": self.model,
            "kind": self.kind,
            "replica": "" if last is None else last.worker,
            "reason": self.error or ("" if last is None else last.reason),
            "outcome": self.outcome,
            "status": self.status,
            "gateway_wait_s": None if last is None else round(last.asked_s - self.came_s, 6),
            "router_wait_s": None if last is None or placed_s is None else round(placed_s - last.asked_s, 6),
            "replica_wait_s": None if first_s is None or placed_s is None else round(first_s - placed_s, 6),
            "duration_s": round(shown["duration_s"], 6),
            "input_tokens": self.input_tokens,
            "cached_tokens": self.cached_tokens,
            "output_tokens": self.output_tokens,
            "retries": shown["retries"],
            "resumes": self.resumed,
            "fallback": shown["fallback"],
            "slo_class": "" if self.promise is None else self.promise.slo_class,
            "slo_s": None if self.promise is None else self.promise.slo_s,
            "slo_attained": self.attained,
            **({"trace_id": self.trace} if self.trace else {}),
        }


class RequestRecord:
    """Notes what happens to requests, and finds them by their own names and by those of their attempts."""

    def __init__(
        self, most: int = MOST_ENDED, log: Callable[[Mapping[str, Any]], None] | None = None
    ) -> None:
        """`log` gets a line for each request that has ended."""
        self._recent: Recent[Exchange] = Recent(most)
        self._log = log
        self.find, self.latest = self._recent.find, self._recent.latest

    def came(self, kind: str, given: str | None) -> Exchange:
        """A request came, which its client calls `given`. It can be found after `enter`."""
        return Exchange(own_name(given), kind, time.monotonic(), time.time())

    def enter(self, exchange: Exchange) -> None:
        """Its client is known. Requests without a valid key are not remembered: there may be any number of them."""
        exchange.is_entered = True
        self._recent.add(exchange, exchange.name)

    def tried(self, exchange: Exchange, id: str) -> Try:
        one = Try(id, time.monotonic())
        exchange.tries.append(one)
        self._recent.name(exchange, id)
        return one

    def placed(self, exchange: Exchange, one: Try, place: Place, *, itself: bool) -> None:
        """The attempt goes to a replica, perhaps under another id than it was asked with; the gateway chose it
        `itself`, or the router did."""
        one.id, one.worker, one.matched_tokens = place.id, place.worker, place.matched_tokens
        one.placed_s, one.is_fallback = time.monotonic(), itself
        self._recent.name(exchange, place.id)

    def ended(self, exchange: Exchange, outcome: str) -> None:
        exchange.ended_s, exchange.outcome = time.monotonic(), outcome
        if exchange.is_entered:
            self._recent.end(exchange)
        if self._log is not None:
            self._log(exchange.line())

    def __len__(self) -> int:
        return len(self._recent)
