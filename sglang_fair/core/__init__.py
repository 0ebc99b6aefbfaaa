"""Fair scheduling as pure code, without engine, clock or global randomness.

    policies      `policy` is their interface; fcfs, rpm, lpm, lcf, vtc, drr, dlpm, wsc, slo and their variants;
                  their `options`
    queue         what waits and what goes first (`queue`, `job`, `clients`, `heap`); clients that are new (`newcomers`)
    admission     forming a batch: which request is next, which waits for a prefix (`admission`, `prefixes`);
                  prompts or tokens for those that run (`steps`, `step_times`); what is notified (`listener`)
    account       what requests cost and whom it is charged to (`account`, `cost`, `ledger`, `payers`, `predictor`); the
                  largest of them, of which bounds are made (`largest`)
    eviction      whose prefixes the cache gives up
    preemption    which running requests are taken back for more urgent ones
    record        what each request waited for and by how many it was overtaken (`record`, `waits`)
    throttle      who is let in while the cluster is overloaded (`throttle`, `interactions`, `windows`); what a call of
                  an application normally needs (`normal`)
    fairness      measures of what each client received

`POLICIES` is the registry. A new policy is one file with the algorithm and one line here.
"""

from collections.abc import Mapping
from dataclasses import Field, fields
from types import NoneType
from typing import Any, get_args

from sglang_fair.common.weights import Weights
from sglang_fair.core.dlpm import Dlpm
from sglang_fair.core.drr import Drr
from sglang_fair.core.fcfs import Fcfs, Lpm
from sglang_fair.core.policy import OPTION, Policy
from sglang_fair.core.predicted import DlpmPredict, VtcNoisy, VtcOracle, VtcPredict
from sglang_fair.core.rpm import Rpm
from sglang_fair.core.slo import Slo
from sglang_fair.core.vtc import Lcf, Vtc
from sglang_fair.core.wsc import Wsc, WscDlpm

POLICIES: Mapping[str, type[Policy]] = {
    policy.name: policy
    for policy in (
        Fcfs, Rpm, Lpm, Lcf, Vtc, VtcPredict, VtcOracle, VtcNoisy, Drr, Dlpm, DlpmPredict, Wsc, WscDlpm, Slo,
    )
}  # fmt: skip


def make_policy(
    name: str, *, quantum: float | None = None, weights: Weights | None = None, **options: Any
) -> Policy:
    """A new policy by name. A policy without quantum or weights ignores them, so that one configuration fits all.
    `options` are its other parameters.

    Raises ValueError for an unknown name, an unknown option, and a bad value.
    """
    known = _option_fields(name)
    for option in options:
        if option not in known:
            has = f"there are {', '.join(known)}" if known else "it has none"
            raise ValueError(f"policy {name} has no option {option!r}; {has}")
    parameters = {field.name for field in fields(POLICIES[name])}  # type: ignore[arg-type]
    common = {"quantum": quantum, "weights": weights}
    given = {key: value for key, value in common.items() if value is not None and key in parameters}
    return POLICIES[name](**given, **{known[option].name: value for option, value in options.items()})


def options_of(name: str) -> Mapping[str, type]:
    """The options of a policy and their types, `int`, `float`, `str` or `bool`. ValueError for an unknown policy."""
    return {option: _value_type(field.type) for option, field in _option_fields(name).items()}


def option_values(policy: Policy) -> Mapping[str, Any]:
    """All options of `policy` with their current values."""
    return {option: getattr(policy, field.name) for option, field in _fields_of(type(policy)).items()}


def _option_fields(name: str) -> "Mapping[str, Field[Any]]":
    """The field of each option. ValueError for an unknown policy."""
    policy = POLICIES.get(name)
    if policy is None:
        raise ValueError(f"unknown policy {name!r}; there are {', '.join(sorted(POLICIES))}")
    return _fields_of(policy)


def _fields_of(policy: type[Policy]) -> "Mapping[str, Field[Any]]":
    return {
        field.metadata.get(OPTION, field.name): field
        for field in fields(policy)  # type: ignore[arg-type]
        if field.init and field.name != "quantum" and _value_type(field.type) in (int, float, str, bool)
    }


def _value_type(kind: Any) -> Any:
    """The type of a value that is given: for `T | None` it is T."""
    kinds = [one for one in get_args(kind) if one is not NoneType]
    return kinds[0] if len(kinds) == 1 else kind
