"""What bounds a gateway: each limit, its default, its meaning, and how an operator writes several of them."""

import math
from dataclasses import dataclass, fields, replace


@dataclass(frozen=True)
class Limits:
    """Counts are of one process. What clients share is shared as `router.shared_limit` says."""

    max_in_flight: int = 4096
    """Requests at a time, shared by the clients."""
    max_connections: int = 8192
    """Connections of clients, shared by their addresses."""
    max_body_bytes: int = 16 << 20
    max_held_bytes: int = 512 << 20
    """Of all bodies that are being read or served; shared by the clients."""
    max_prompt_tokens: int = 1 << 17
    """Of all prompts of one request together; a text counts a quarter of its characters, and twice the context is
    always allowed. A replica's HTTP process reads them in one go and answers nobody meanwhile."""
    max_context_tokens: int = 0
    """Longest prompt; 0: as the replicas say."""
    tries: int = 3
    connect_timeout_s: float = 2.0
    head_timeout_s: float = 15.0
    """A connection on which no whole head of a request has come for this long is closed."""
    body_timeout_s: float = 300.0
    """Longest time for a whole body."""
    idle_timeout_s: float = 600.0
    """Longest silence of a replica, its queue included, and of a client that reads too slowly."""
    health_timeout_s: float = 10.0
    """A replica that nothing comes from for this long is given up."""
    progress_interval_s: float = 1.0
    """How often the router hears of a stream's output; 0 for never."""


DEFAULTS = Limits()

MEANING = {
    "max_in_flight": "requests at a time and process, half of them for one client alone; more get 429",
    "max_connections": "connections of clients, half of them for one address alone; more get 429",
    "max_body_bytes": "largest request body",
    "max_held_bytes": "all bodies in flight together, shared by the clients; more get 429",
    "max_prompt_tokens": "all prompts of one request together; a text counts a quarter of its characters",
    "max_context_tokens": "longest prompt; 0: as the replicas say",
    "tries": "replicas to try before a request fails",
    "connect_timeout_s": "longest wait for a connection to a replica",
    "head_timeout_s": "a connection without a whole request head for this long is closed",
    "body_timeout_s": "longest time for a whole request body",
    "idle_timeout_s": "longest silence of a replica or a reader",
    "health_timeout_s": "a replica that nothing comes from for this long is given up",
    "progress_interval_s": "how often the router hears of a stream's output; 0 for never",
}
"""One line for each field."""

MAY_BE_ZERO = ("max_context_tokens", "progress_interval_s")


OTHER_DESCRIPTORS = 128
"""Open files besides connections of clients and of requests."""


def option(name: str) -> str:
    """How a limit is called where an operator sets it."""
    return name.removesuffix("_s").replace("_", "-")


def wrong(name: str, value: float) -> str | None:
    """What is wrong with a value, in words that follow the limit's name."""
    if not math.isfinite(value) or value < 0 or (value == 0 and name not in MAY_BE_ZERO):
        return f"must be a positive number, not {value}"
    return None


def fit(limits: Limits, descriptors: int) -> Limits:
    """`limits` with which a process that may open so many files does not run out of them.

    A request needs one for its replica, besides its client's connection.
    """
    free = max(3, descriptors - OTHER_DESCRIPTORS)
    requests = min(limits.max_in_flight, max(free // 3, free - limits.max_connections))
    return replace(
        limits, max_in_flight=requests, max_connections=min(limits.max_connections, free - requests)
    )


def parse(text: str) -> dict[str, int | float]:
    """The limits in `max-in-flight=100,body-timeout=60`, by field.

    ValueError, in one line, for what is not KEY=VALUE, said twice, no limit, or no such number.
    """
    known = {option(one.name): one.name for one in fields(Limits)}
    found: dict[str, int | float] = {}
    for pair in filter(None, (pair.strip() for pair in text.split(","))):
        key, equals, value = (part.strip() for part in pair.partition("="))
        if not equals or not key:
            raise ValueError(f"limits are KEY=VALUE, separated by commas, and {pair!r:.80} is not one")
        name = known.get(key.replace("_", "-").removeprefix("--"))
        if name is None:
            raise ValueError(f"a gateway has no limit {key!r:.80}; there are {', '.join(known)}")
        if name in found:
            raise ValueError(f"limit {key} is given twice")
        kind = type(getattr(DEFAULTS, name))
        try:
            number = kind(value)
        except ValueError:
            what = "a whole number" if kind is int else "a number"
            raise ValueError(f"limit {key} must be {what}, not {value!r:.80}") from None
        if (error := wrong(name, number)) is not None:
            raise ValueError(f"limit {key} {error}")
        found[name] = number
    return found
