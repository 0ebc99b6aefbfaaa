"""The spans of one request, made from what gateway, router and replica remember of it. Pure.

    POST /v1/chat/completions     gateway     from its arrival to its outcome
      attempt                     gateway     one replica serves it, or should have; one more for each retry and resume
        placement                 router      why that replica, and which one would have been next
        waiting                   replica     what it waited for, by cause, and who went first
        prefill                   replica     tokens of the prompt: computed, and found in the cache
        decode                    replica     tokens of the answer, and how it ended

Nothing is computed anew: an attribute `sglang_fair.NAME` is what `GET /explain/ID` says under that name, and where
OpenTelemetry has a name of its own (`http.*`, `gen_ai.*`), it is there too. No text of a request or an answer is in it.

Times are the gateway's. Clocks of other machines may be wrong by any amount, so none is asked: router and replica say
how long something took, and how long ago a request came. A request came to its replica after the attempt was placed,
long enough before the attempt's end, and its age before the replica was asked for it: in the middle of what these
leave. The router's part is in the middle of the gateway's wait for its answer. Whatever is said, every span lies within
its parent's, and they follow each other.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from router.gateway.record import Exchange, Try

OWN = "sglang_fair."
"""Before the name of an attribute of ours."""

GATEWAY, ROUTER, REPLICA = "gateway", "router", "replica"
"""Whose span it is."""

Value = str | bool | int | float | Sequence[str]
Attributes = dict[str, Value]

REQUEST = (
    "request", "kind", "client", "outcome", "error", "retries", "resumes", "fallback", "ttft_s", "slo"
)  # fmt: skip
ATTEMPT = ("id", "worker", "matched_tokens", "fallback", "outcome", "reason")
PLACEMENT = (
    "why", "worker", "next_best", "candidates", "excluded", "waited_for", "waited_s", "refused", "input_tokens",
    "model", "slo",
)  # fmt: skip
WAITING = (
    "waited_s", "waited_again_s", "waited_for_s", "waiting_at_arrival", "running_at_arrival", "overtaken_by",
    "overtaken_in_batches", "counter_at_arrival", "counter_at_admission", "refills",
)  # fmt: skip
PREFILL = ("prompt_tokens", "extend_tokens", "cached_tokens")
DECODE = ("output_tokens", "max_output_tokens", "retractions")
END = ("outcome", "reason")
"""Of the last span that a replica's record makes: how it ended there."""

OPERATIONS = {"chat": "chat", "completions": "text_completion", "generate": "text_completion"}
"""OpenTelemetry's names for the kinds of requests."""

ROUNDING_S = 1e-6
"""Differences of monotonic clocks are no more exact than that."""

FAILED = ("failed", "unplaced", "refused")
"""Outcomes of an attempt that are errors of the gateway's peer."""


@dataclass(frozen=True, slots=True)
class Told:
    """What router and replica say of one attempt. Times are the gateway's monotonic clock."""

    attempt: Mapping[str, Any]
    """As in `GET /explain/ID`."""
    router_error: str
    """Why the router could not be asked; "" if it could."""
    asked_s: float
    """When the replica was asked."""
    answered_s: float


@dataclass(frozen=True, slots=True)
class Child:
    """A span below an attempt's. Times are the gateway's monotonic clock."""

    service: str
    name: str
    began_s: float
    ended_s: float
    attributes: Attributes


def is_settled(told: Sequence[Told]) -> bool:
    """Whether every replica that remembers the request is done with it."""
    return all(record["state"] == "ended" for one in told for record in one.attempt["replica"] or ())


def of_request(exchange: "Exchange") -> Attributes:
    """The attributes of the gateway's own span, for a request that has ended."""
    shown = exchange.shown(exchange.ended_s or exchange.came_s)
    tokens = shown["tokens"]
    known = {
        "http.response.status_code": shown["status"],
        "gen_ai.operation.name": OPERATIONS.get(shown["kind"], shown["kind"]),
        "gen_ai.request.model": shown["model"],
        "gen_ai.usage.input_tokens": tokens["input"],
        "gen_ai.usage.cache_read.input_tokens": tokens["cached"],
        "gen_ai.usage.output_tokens": tokens["output"],
    }
    return {**_flat("", known), **_own(shown, REQUEST)}


def error_of_request(exchange: "Exchange") -> str | None:
    """Why it failed, by the server's fault; None: it did not. What its client did wrong is no error of a server."""
    return (exchange.error or "failed") if exchange.outcome == "failed" else None


def of_attempt(one: "Try", shown: Mapping[str, Any], told: Told | None) -> Attributes:
    """The attributes of an attempt's span; `shown` is what the gateway itself says of it."""
    found = _own(shown, ATTEMPT)
    if told is not None:
        found |= _own({"replica_error": told.attempt["replica_error"], "router_error": told.router_error})
    elif one.placed_s is not None:
        found |= _own({"replica_error": "not asked: too many requests ended at a time"})
    return found


def error_of_attempt(one: "Try") -> str | None:
    """Why it failed; None: it did not."""
    return (one.reason or one.outcome) if one.outcome in FAILED else None


def below(one: "Try", told: Told | None) -> Iterator[Child]:
    """The spans below the attempt `one`, which has ended."""
    assert one.ended_s is not None
    yield _placement(one, told)
    if told is not None and one.placed_s is not None:
        for record in told.attempt["replica"] or ():
            yield from _served(one.placed_s, one.ended_s, record, told)


def _placement(one: "Try", told: Told | None) -> Child:
    ended_s = one.ended_s if one.placed_s is None else one.placed_s
    assert ended_s is not None
    placement = None if told is None else told.attempt["router"]
    if one.is_fallback or placement is None:
        why = {"why": GATEWAY if one.is_fallback else "", "worker": {"worker": one.worker}}
        return Child(GATEWAY, "placement", one.asked_s, ended_s, _own(why))
    spare_s = max(0.0, ended_s - one.asked_s - _seconds(placement["waited_s"]))
    began_s = one.asked_s + spare_s / 2
    return Child(
        ROUTER, "placement", began_s, max(began_s, ended_s - spare_s / 2), _own(placement, PLACEMENT)
    )


def _served(placed_s: float, ended_s: float, record: Mapping[str, Any], told: Told) -> Iterator[Child]:
    """The replica's part, which lies between `placed_s` and `ended_s`."""
    prefill_s, decode_s = record["prefill_s"], record["decode_s"]
    first_s = _seconds(record["waited_s"]) - _seconds(record["waited_again_s"])
    parts: list[tuple[str, Any, tuple[str, ...]]] = [("waiting", first_s, WAITING)]
    parts += [("prefill", prefill_s, PREFILL)] if prefill_s is not None else []
    parts += [("decode", decode_s, DECODE)] if decode_s is not None else []
    lengths = [_seconds(length) for _, length, _ in parts]
    age_s = _seconds(record["came_s_ago"])
    low_s = max(placed_s, told.asked_s - age_s)
    high_s = min(ended_s - sum(lengths), told.answered_s - age_s)
    if low_s > high_s + ROUNDING_S:  # it went on there after its end here: its client had left
        low_s, high_s = told.asked_s - age_s, told.answered_s - age_s
    at_s = _within((low_s + high_s) / 2, placed_s, ended_s)
    for number, ((name, _, fields), length) in enumerate(zip(parts, lengths, strict=True)):
        until_s = _within(at_s + length, at_s, ended_s)
        attributes = _own({"worker": told.attempt["worker"]}) | _own(record, fields)
        if name == "waiting":
            attributes |= _own({"waited_for": next(iter(record["waited_for_s"]), "")})
        elif name == "prefill":
            tokens = {"input_tokens": "prompt_tokens", "cache_read.input_tokens": "cached_tokens"}
            attributes |= {f"gen_ai.usage.{key}": record[field] for key, field in tokens.items()}
        else:
            attributes["gen_ai.usage.output_tokens"] = record["output_tokens"]
        if number == len(parts) - 1:
            attributes |= _own(record, END)
        yield Child(REPLICA, name, at_s, until_s, attributes)
        at_s = until_s


def _within(value: float, low: float, high: float) -> float:
    return max(low, min(value, high))


def _seconds(value: Any) -> float:
    """A length. Whoever says something else has said nothing."""
    return float(value) if isinstance(value, int | float) and isfinite(value) and value > 0 else 0.0


def _own(shown: Mapping[str, Any], fields: Sequence[str] | None = None) -> Attributes:
    """Of these fields, or all."""
    return _flat(OWN, shown if fields is None else {field: shown[field] for field in fields})


def _flat(prefix: str, shown: Mapping[str, Any]) -> Attributes:
    """What there is, with the names of objects within objects joined by dots."""
    found: Attributes = {}
    for name, value in shown.items():
        if isinstance(value, Mapping):
            found |= _flat(f"{prefix}{name}.", value)
        elif isinstance(value, list):
            if value:
                found[prefix + name] = [str(each) for each in value]
        elif value is not None and value != "":
            found[prefix + name] = value
    return found
