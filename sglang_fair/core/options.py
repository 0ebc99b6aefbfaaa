"""A policy's own options as an operator writes them: `patience=64,remembered_clients=500`.

A policy's dataclass defines its options and their types (`options_of`); the policy itself checks the values.
"""

from collections.abc import Mapping

from sglang_fair.common.pairs import split_pairs, typed
from sglang_fair.common.weights import Weights
from sglang_fair.core import make_policy, options_of
from sglang_fair.core.cost import Cost, Linear, describe
from sglang_fair.core.payers import FIRST
from sglang_fair.core.policy import Policy

Option = int | float | str | bool

SHIPPED: Mapping[str, str] = {"dlpm": "borrow=0.3"}
"""An option that a replica's policy has unless it is given another value. Without it the policy is the algorithm as its
paper prints it."""


def parse(policy: str, text: str) -> dict[str, Option]:
    """The options in `text`, typed for `policy`.

    ValueError, in one line, for text that is not KEY=VALUE, and for keys that are repeated, unknown, or mistyped.
    """
    known = options_of(policy)
    options: dict[str, Option] = {}
    for key, value in split_pairs(text, "option"):
        if key not in known:
            has = f"there are {', '.join(known)}" if known else "it has none"
            raise ValueError(f"policy {policy} has no option {key!r:.80}; {has}")
        options[key] = typed(value, known[key], f"option {key}")
    return options


def shipped(policy: str, text: str) -> str:
    """The options in `text`, and the policy's of `SHIPPED` if they do not name that. ValueError as for `parse`."""
    own = SHIPPED.get(policy, "")
    if not own or own.partition("=")[0] in parse(policy, text):
        return text
    return f"{own},{text}" if text else own


def make(policy: str, text: str, *, quantum: float | None, weights: Weights) -> Policy:
    """A new policy with the options in `text`; quantum None: the policy's own default.

    ValueError as for `parse`, and for values that the policy rejects.
    """
    return make_policy(policy, quantum=quantum, weights=weights, **parse(policy, text))


def check_together(policy: Policy, cost: Cost, payer: str) -> None:
    """ValueError, in one line, if requests under this policy cannot have this cost or payer."""
    if not policy.scales:
        return
    if not isinstance(cost, Linear):
        raise ValueError(
            f"policy {policy.name} divides by what is normal, so the cost must be linear, not {describe(cost):.80}"
        )
    if payer != FIRST:
        raise ValueError(
            f"policy {policy.name} needs payer {FIRST}, not {payer}: what a call costs is its own"
        )
