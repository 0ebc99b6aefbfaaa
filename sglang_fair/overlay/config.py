"""A replica's fairness settings: server arguments, or the environment, one table for both.

SGLang starts its scheduler in another process, so an argument is written to the environment when the
arguments are read and found there by every child.
"""

import argparse
import json
import os
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field

from sglang_fair.core import POLICIES, make_policy
from sglang_fair.core.cost import Linear
from sglang_fair.core.identity import DEFAULT_ORDER
from sglang_fair.core.policy import Policy, Weights

STOCK_POLICIES = ("lpm", "random", "fcfs", "dfs-weight", "lof", "priority", "routing-key", "hrrn")
"""Names that keep SGLang's own meaning after --schedule-policy."""


def server_name(policy: str) -> str:
    """Our policy's name after --schedule-policy. Stock SGLang refuses it: a lost overlay cannot go unseen."""
    return f"fair-{policy}" if policy in STOCK_POLICIES else policy


SERVER_POLICIES: Mapping[str, str] = {server_name(name): name for name in POLICIES}
"""--schedule-policy value to the name in `POLICIES`."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting: the argument, its environment variable and how to say what it is."""

    argument: str
    variable: str
    metavar: str
    help: str


SETTINGS: tuple[Setting, ...] = (
    Setting("--fair-quantum", "SGLANG_FAIR_QUANTUM", "UNITS",
            "DLPM's quantum Q^u per client, in service units (default 2000)"),
    Setting("--fair-extend-weight", "SGLANG_FAIR_EXTEND_WEIGHT", "W_E",
            "units that one computed input token costs (default 1)"),
    Setting("--fair-output-weight", "SGLANG_FAIR_OUTPUT_WEIGHT", "W_Q",
            "units that one output token costs (default 2)"),
    Setting("--fair-client-weights", "SGLANG_FAIR_CLIENT_WEIGHTS", "JSON",
            'shares per client, for example {"gold": 2} (default 1 for everybody)'),
    Setting("--fair-identity", "SGLANG_FAIR_IDENTITY", "PLACES",
            f"where the client's name is looked for, comma separated (default {','.join(DEFAULT_ORDER)})"),
)  # fmt: skip

POLICY_VARIABLE = "SGLANG_FAIR_POLICY"
"""Chooses the policy where no --schedule-policy can be given; same names as --schedule-policy."""


@dataclass(frozen=True)
class Config:
    """Settings as the scheduler uses them."""

    quantum: float = 2000.0
    cost: Linear = field(default_factory=Linear)
    client_weights: Mapping[str, float] | None = None
    identity: tuple[str, ...] = DEFAULT_ORDER

    def policy(self, name: str) -> Policy:
        """A new policy object. ValueError for an unknown name or a bad value."""
        return make_policy(name, quantum=self.quantum, weights=Weights(self.client_weights))


def read(environ: Mapping[str, str] = os.environ) -> Config:
    """The settings in `environ`. ValueError names the variable that is wrong."""

    def number(variable: str, default: float) -> float:
        text = environ.get(variable)
        try:
            return float(text) if text else default
        except ValueError:
            raise ValueError(f"{variable} must be a number, not {text!r}") from None

    weights_text = environ.get("SGLANG_FAIR_CLIENT_WEIGHTS") or "{}"
    try:
        weights = json.loads(weights_text)
    except json.JSONDecodeError as error:
        raise ValueError(f"SGLANG_FAIR_CLIENT_WEIGHTS is not JSON: {error}") from None
    if not isinstance(weights, dict):
        raise ValueError(f"SGLANG_FAIR_CLIENT_WEIGHTS must map client names to numbers, not {weights_text}")
    places = environ.get("SGLANG_FAIR_IDENTITY")
    config = Config(
        quantum=number("SGLANG_FAIR_QUANTUM", 2000.0),
        cost=Linear(number("SGLANG_FAIR_EXTEND_WEIGHT", 1.0), number("SGLANG_FAIR_OUTPUT_WEIGHT", 2.0)),
        client_weights=weights,
        identity=tuple(place.strip().lower() for place in places.split(",")) if places else DEFAULT_ORDER,
    )
    config.policy("dlpm")  # every value is checked here, in the process that the operator sees
    return config


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Our arguments on SGLang's parser, and our policies among the choices of --schedule-policy."""
    for action in parser._actions:
        if "--schedule-policy" in action.option_strings:
            action.choices = [*(action.choices or ()), *SERVER_POLICIES]
    group = parser.add_argument_group("fair scheduling (sglang-fair)")
    for setting in SETTINGS:
        group.add_argument(
            setting.argument,
            metavar=setting.metavar,
            help=f"{setting.help}; environment: {setting.variable}",
        )


def adopt_arguments(arguments: argparse.Namespace, environ: MutableMapping[str, str] = os.environ) -> None:
    """Move the given arguments into `environ`, and the policy out of it. SystemExit on a bad value."""
    for setting in SETTINGS:
        value = getattr(arguments, setting.argument.lstrip("-").replace("-", "_"), None)
        if value is not None:
            environ[setting.variable] = value
    name = environ.get(POLICY_VARIABLE)
    if name:
        if name not in SERVER_POLICIES and name not in STOCK_POLICIES:
            raise SystemExit(
                f"sglang-fair: {POLICY_VARIABLE}={name} is unknown; there are {', '.join(SERVER_POLICIES)}"
            )
        arguments.schedule_policy = name
    if getattr(arguments, "schedule_policy", None) in SERVER_POLICIES:
        refuse_combinations(arguments)
    try:
        read(environ)
    except ValueError as error:
        raise SystemExit(f"sglang-fair: {error}") from None


def refuse_combinations(arguments: argparse.Namespace) -> None:
    """SystemExit for features that reorder or walk the queue behind a fair policy's back."""
    for attribute, harmless, flag in (
        ("enable_priority_scheduling", False, "--enable-priority-scheduling"),
        ("lora_drain_wait_threshold", 0.0, "--lora-drain-wait-threshold"),
        ("disaggregation_mode", "null", "--disaggregation-mode"),
    ):
        if getattr(arguments, attribute, harmless) not in (harmless, None):
            raise SystemExit(f"sglang-fair: {flag} cannot be combined with a fair policy")
