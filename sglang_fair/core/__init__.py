"""Fair scheduling as pure code: jobs, policies, costs, books. No engine, no clock, no global randomness.

`POLICIES` is the one registry. A new policy is one file with the algorithm and one line here.
"""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from sglang_fair.core.dlpm import Dlpm
from sglang_fair.core.drr import Drr
from sglang_fair.core.fcfs import Fcfs
from sglang_fair.core.lcf import Lcf
from sglang_fair.core.lpm import Lpm
from sglang_fair.core.policy import Policy
from sglang_fair.core.predicted import DlpmPredict, VtcNoisy, VtcOracle, VtcPredict
from sglang_fair.core.vtc import Vtc

POLICIES: Mapping[str, type[Policy]] = {
    policy.name: policy
    for policy in (Fcfs, Lpm, Lcf, Vtc, VtcPredict, VtcOracle, VtcNoisy, Drr, Dlpm, DlpmPredict)
}


def make_policy(name: str, **parameters: Any) -> Policy:
    """A new policy by name; a parameter that it does not have is ignored, so one configuration fits all.

    Raises ValueError for an unknown name and for a bad value.
    """
    policy = POLICIES.get(name)
    if policy is None:
        raise ValueError(f"unknown policy {name!r}; there are {', '.join(sorted(POLICIES))}")
    known = {field.name for field in fields(policy) if field.init}  # type: ignore[arg-type]
    return policy(**{key: value for key, value in parameters.items() if key in known})
