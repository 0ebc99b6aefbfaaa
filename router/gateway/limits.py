"""What bounds a gateway: what a process has room for, and how several limits are written in one word.

The limits themselves, with their defaults and their meaning, are in the table of settings.
"""

from dataclasses import replace
from typing import TypeVar

from sglang_fair.common.pairs import split_pairs, typed
from sglang_fair.settings.setting import settings_of
from sglang_fair.settings.table import Limits

Bounded = TypeVar("Bounded", bound=Limits)

OTHER_DESCRIPTORS = 128
"""Open files besides connections of clients and of requests."""


def fit(limits: Bounded, descriptors: int) -> Bounded:
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

    Raises ValueError, in one line, for what is no pair, given twice, no limit, or no value that it may have.
    """
    known = {setting.key: setting for setting in settings_of(Limits).values()}
    found: dict[str, int | float] = {}
    for key, value in split_pairs(text, "limit"):
        setting = known.get(key.replace("-", "_").removeprefix("__"))
        if setting is None:
            names = ", ".join(one.flag.removeprefix("--") for one in known.values())
            raise ValueError(f"a gateway has no limit {key!r:.80}; there are {names}")
        if setting.field in found:
            raise ValueError(f"limit {key!r:.80} is given twice")
        number = typed(value, setting.kind, f"limit {key}")
        setting.check(number, f"limit {key}")
        found[setting.field] = number
    return found
