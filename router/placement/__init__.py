"""Which worker for this request: the placements by name. A new one is one file and one line here."""

import json
from dataclasses import fields

from router.placement.cache_aware import CacheAware
from router.placement.centralized_dlpm import CentralizedDlpm
from router.placement.client_round_robin import ClientRoundRobin
from router.placement.contract import Placement
from router.placement.d2lpm import D2lpm
from router.placement.d2lpm_time import D2lpmTime
from router.placement.d2lpm_tokens import D2lpmTokens
from router.placement.least_requests import LeastRequests
from router.placement.least_tokens import LeastTokens
from router.placement.power_of_two import PowerOfTwo
from router.placement.preble import Preble
from router.placement.round_robin import RoundRobin

PLACEMENTS: dict[str, type[Placement]] = {
    "d2lpm": D2lpm,
    "d2lpm-tokens": D2lpmTokens,
    "d2lpm-time": D2lpmTime,
    "round_robin": RoundRobin,
    "client_round_robin": ClientRoundRobin,
    "least_requests": LeastRequests,
    "least_tokens": LeastTokens,
    "power_of_two": PowerOfTwo,
    "cache_aware": CacheAware,
    "preble": Preble,
    "centralized_dlpm": CentralizedDlpm,
}


def parameters(placement: str) -> tuple[str, ...]:
    """The names of a placement's parameters: the fields of its dataclass."""
    return tuple(field.name for field in fields(_known(placement)) if field.init)  # type: ignore[arg-type]


def build(placement: str, **values: object) -> Placement:
    """The placement of this name. Raises ValueError for an unknown name, parameter, or value."""
    unknown = sorted(set(values) - set(parameters(placement)))
    if unknown:
        raise ValueError(f"placement {placement} has no parameter {', '.join(unknown)}")
    try:
        return _known(placement)(**values)
    except TypeError as error:
        raise ValueError(f"placement {placement}: a parameter is of the wrong type: {error}") from error


def parse_options(text: str) -> dict[str, object]:
    """Parameters as an operator writes them: `NAME=VALUE,...`, each value a number or another word of JSON, or a bare
    word. ValueError, in one line, for what is not that, or is said twice."""
    found: dict[str, object] = {}
    for pair in filter(None, (pair.strip() for pair in text.split(","))):
        name, equals, value = (part.strip() for part in pair.partition("="))
        if not name or not equals:
            raise ValueError(
                f"a placement's options are NAME=VALUE, separated by commas, and {pair!r} is not one"
            )
        if name in found:
            raise ValueError(f"a placement's option {name} is given twice")
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
    return found


def _known(placement: str) -> type[Placement]:
    if placement not in PLACEMENTS:
        raise ValueError(f"no placement {placement!r}: there are {', '.join(PLACEMENTS)}")
    return PLACEMENTS[placement]
