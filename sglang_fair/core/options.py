"""A policy's own options as an operator writes them: `patience=64,remembered_clients=500`.

A policy's dataclass defines its options and their types (`options_of`); the policy itself checks the values.
"""

from collections.abc import Mapping

from sglang_fair.common.weights import Weights
from sglang_fair.core import make_policy, options_of
from sglang_fair.core.policy import Policy

Option = int | float | str | bool

_BOOLEANS = {"true": True, "false": False}


def parse(policy: str, text: str) -> dict[str, Option]:
    """The options in `text`, typed for `policy`.

    ValueError, in one line, for text that is not KEY=VALUE, and for keys that are repeated, unknown, or mistyped.
    """
    known = options_of(policy)
    options: dict[str, Option] = {}
    for pair in filter(None, (pair.strip() for pair in text.split(","))):
        key, equals, value = (part.strip() for part in pair.partition("="))
        if not equals or not key:
            raise ValueError(f"options are KEY=VALUE, separated by commas, and {pair!r:.80} is not one")
        if key in options:
            raise ValueError(f"option {key!r:.80} is given twice")
        if key not in known:
            has = f"there are {', '.join(known)}" if known else "it has none"
            raise ValueError(f"policy {policy} has no option {key!r:.80}; {has}")
        options[key] = _typed(key, value, known[key])
    return options


def make(policy: str, text: str, *, quantum: float, weights: Weights) -> Policy:
    """A new policy with the options in `text`. ValueError as for `parse`, and for values that the policy rejects."""
    return make_policy(policy, quantum=quantum, weights=weights, **parse(policy, text))


def shown(policy: Policy) -> Mapping[str, Option]:
    """All options of `policy` with their current values."""
    return {option: getattr(policy, option) for option in options_of(policy.name)}


def _typed(key: str, value: str, kind: type) -> Option:
    try:
        found: Option = _BOOLEANS[value.lower()] if kind is bool else kind(value)
    except (KeyError, ValueError):
        what = {bool: "true or false", int: "a whole number", float: "a number"}[kind]
        raise ValueError(f"option {key} must be {what}, not {value!r:.80}") from None
    return found
