"""By when the first token of an answer is promised: the service-level objective (SLO) of a request.

A client says it in headers:

    x-fair-class     one of the operator's classes, each with a time to first token; the first, if it says none
    x-fair-slo-ms    a time to first token of its own, in milliseconds, in place of its class's. Other stacks'
                     names for it, x-sgl-ttft-slo-ms and x-llm-d-slo-ttft-ms, count too, in this order

The time counts from the request's arrival at the gateway. A later call of an interaction has class and start of its
first one, so it is due before new ones (`core.interactions`). To a replica the gateway says the class in the same
header, and how much of the time is left in `HEADER_SLACK`, and the tier in `HEADER_TIER`. No client can set these two.

A request that has not begun within its time to live (`HEADER_TTL`) is dropped: it has begun once a replica computes it.
"""

import re
from collections.abc import Mapping
from math import isfinite
from typing import Any, Literal, NamedTuple

HEADER_CLASS = "x-fair-class"
HEADER_SLACK = "x-fair-slack-ms"
"""Milliseconds that are left until the first token is due; negative once it is overdue."""

HEADER_TIER = "x-fair-tier"
"""1 for a request beyond its client's share of the cluster, as the router's placement judges it; else 0, or none."""

HEADER_TTL = "x-fair-ttl-ms"
"""Milliseconds from a request's arrival, at the gateway or at the replica that gets it."""

FIELD_TTL = "ttl_ms"
"""The same in a body, where no header says it."""

EXPIRED_STATUS = 504
EXPIRED_CODE = "expired"
EXPIRED = "the request had not begun within its time to live, and was dropped; nothing of it was computed"

HEADERS_SLO = ("x-fair-slo-ms", "x-sgl-ttft-slo-ms", "x-llm-d-slo-ttft-ms")

MOST_SLO_S = 7 * 86_400.0
MOST_CLASSES = 32

DEFAULT_CLASSES: Mapping[str, float] = {"interactive": 20.0, "batch-1": 60.0, "batch-2": 3600.0}
"""Those of the QLM paper (arXiv 2407.00047, section 8): seconds to the first token."""

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_NUMBER = re.compile(r"[+-]?(\d{1,20}(\.\d{0,20})?|\.\d{1,20})([eE][+-]?\d{1,3})?", re.ASCII)


class Promise(NamedTuple):
    """When an answer's first token is due, by the clock of who keeps it, and by which promise."""

    slo_class: str
    slo_s: float
    due_s: float

    def renewed(self, now_s: float) -> "Promise":
        """That of a stream which has begun and is continued elsewhere: its first token has come, in time or not, so it
        is as urgent as a request that comes at `now_s`. By its old promise it would take turns with others that are
        late, for ever."""
        return self._replace(due_s=now_s + self.slo_s)

    def headers(self, now_s: float) -> dict[str, str]:
        """For the replica, to which the request goes at `now_s`."""
        return {HEADER_CLASS: self.slo_class, HEADER_SLACK: f"{1e3 * (self.due_s - now_s):.1f}"}


Attained = Literal["met", "missed", "neither"]
ATTAINED: tuple[Attained, ...] = ("met", "missed", "neither")


def attained(
    promise: Promise, arrived_s: float, first_s: float | None, ended_s: float, outcome: str
) -> Attained:
    """What became of a request's own time to first token: its class's, from its own arrival, also in an interaction.

    `first_s` is when the first piece of its answer came, None: none did, and it ended at `ended_s` with `outcome`. One
    that failed was missed. One that was refused, or that its client left before the time was over, is neither.
    """
    until_s = arrived_s + promise.slo_s
    if first_s is not None:
        return "met" if first_s <= until_s else "missed"
    if outcome == "failed" or (outcome == "left" and ended_s > until_s):
        return "missed"
    return "neither"


class BadDeadline(ValueError):
    """A request's headers promise nothing that can be promised; the text says what must stand in `header`."""

    def __init__(self, header: str, text: str) -> None:
        super().__init__(f"{header} {text}")
        self.header = header


class Classes:
    """The classes that there are. ValueError, in one line, for those that cannot be."""

    def __init__(self, seconds: Mapping[str, float] = DEFAULT_CLASSES) -> None:
        if not 1 <= len(seconds) <= MOST_CLASSES:
            raise ValueError(f"there must be 1 to {MOST_CLASSES} classes, not {len(seconds)}")
        for name, slo_s in seconds.items():
            if not _NAME.fullmatch(name):
                raise ValueError(
                    f"a class is called by up to 64 letters, digits, dots and dashes, not {name!r:.80}"
                )
            if not 0 < slo_s <= MOST_SLO_S:
                raise ValueError(
                    f"class {name}: its time must be above 0 and at most a week, not {slo_s!r:.80} s"
                )
        self.seconds = dict(seconds)
        self.default = next(iter(self.seconds))

    def promise(self, headers: Mapping[str, str], now_s: float) -> Promise:
        """What a request with these headers (lower-case names) that came at `now_s` is promised. Raises
        `BadDeadline`."""
        name = self.default
        if HEADER_CLASS in headers:
            name = headers[HEADER_CLASS].strip()
            if name not in self.seconds:
                raise BadDeadline(HEADER_CLASS, f"must be one of {', '.join(self.seconds)}")
        slo_s = self.seconds[name]
        for header in HEADERS_SLO:
            if header in headers:
                slo_s = _seconds(header, headers[header].strip())
                break
        return Promise(name, slo_s, now_s + slo_s)


def _seconds(header: str, text: str) -> float:
    time_ms = float(text) if _NUMBER.fullmatch(text) else 0.0
    if not 0 < time_ms <= 1e3 * MOST_SLO_S:
        raise BadDeadline(header, "must be a number of milliseconds above 0 and at most a week")
    return time_ms / 1e3


def time_to_live(headers: Mapping[str, str]) -> float | None:
    """In seconds, by headers with lower-case names; None: they say none. Raises `BadDeadline`."""
    return _seconds(HEADER_TTL, headers[HEADER_TTL].strip()) if HEADER_TTL in headers else None


def read_slack(text: str) -> float | None:
    """Seconds that are left, as the gateway's `HEADER_SLACK` says; None for anything else."""
    if not _NUMBER.fullmatch(text):
        return None
    slack_s = float(text) / 1e3
    return slack_s if isfinite(slack_s) and abs(slack_s) <= 2 * MOST_SLO_S else None


def read_tier(text: str) -> int:
    """The tier in a gateway's `HEADER_TIER`; 0 for anything but 1."""
    return 1 if text == "1" else 0


def read_class(text: str) -> str:
    """The class in a gateway's `HEADER_CLASS`; "" for what is no class's name."""
    return text if _NAME.fullmatch(text) else ""


def make_classes(content: Any, where: str) -> Classes:
    """The classes that `content`, which stood in `where`, says. ValueError, in one line that names `where`."""
    try:
        return Classes(content)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
