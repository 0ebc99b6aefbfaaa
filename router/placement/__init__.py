"""The placements by name. A new one is one class, in a file here, and one line in `PLACEMENTS`."""

import json
from dataclasses import fields

from router.placement.cache_aware import CacheAware
from router.placement.centralized_dlpm import CentralizedDlpm
from router.placement.contract import Placement
from router.placement.d2lpm import D2lpm
from router.placement.d2lpm_queue import D2lpmQueue
from router.placement.deadline.rule import Deadline
from router.placement.least import LeastRequests, LeastTokens, LMetric, PowerOfTwo
from router.placement.preble import Preble
from router.placement.qlm import Qlm
from router.placement.round_robin import ClientRoundRobin, RoundRobin
from sglang_fair.common.pairs import split_pairs

PLACEMENTS: dict[str, type[Placement]] = {
    "d2lpm": D2lpm,
    "d2lpm-queue": D2lpmQueue,
    "round_robin": RoundRobin,
    "client_round_robin": ClientRoundRobin,
    "least_requests": LeastRequests,
    "least_tokens": LeastTokens,
    "power_of_two": PowerOfTwo,
    "lmetric": LMetric,
    "cache_aware": CacheAware,
    "preble": Preble,
    "centralized_dlpm": CentralizedDlpm,
    "deadline": Deadline,
    "qlm": Qlm,
}


def parameters(placement: str) -> tuple[str, ...]:
    """The names of a placement's parameters, which are the fields of its dataclass."""
    return tuple(field.name for field in fields(_known(placement)) if field.init)  # type: ignore[arg-type]


def plans(placement: str) -> bool:
    """Whether it has queues with deadlines. Raises ValueError for an unknown name."""
    return _known(placement).plans


def build(placement: str, **values: object) -> Placement:
    """A new placement of this name. Raises ValueError for an unknown name or parameter, and for a bad value."""
    unknown = sorted(set(values) - set(parameters(placement)))
    if unknown:
        raise ValueError(f"placement {placement} has no parameter {', '.join(unknown)}")
    try:
        return _known(placement)(**values)
    except TypeError as error:
        raise ValueError(f"placement {placement}: a parameter is of the wrong type: {error}") from error


def parse_options(text: str) -> dict[str, object]:
    """A placement's parameters from `KEY=VALUE,...`. A value is JSON, such as a number, or a bare word.

    Raises ValueError, in one line, for anything that is not a pair, and for a parameter that is given twice.
    """
    return {name: parse_value(value) for name, value in split_pairs(text, "placement option")}


def parse_value(text: str) -> object:
    """The value that `text` is in JSON, else `text` itself."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _known(placement: str) -> type[Placement]:
    if placement not in PLACEMENTS:
        raise ValueError(f"no placement {placement!r}: there are {', '.join(PLACEMENTS)}")
    return PLACEMENTS[placement]
