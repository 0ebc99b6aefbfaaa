"""A replica's fairness settings: server arguments, or the environment, one table for both.

SGLang starts its scheduler in another process, so an argument is written to the environment when the
arguments are read and found there by every child.
"""

import argparse
import json
import os
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field, replace

from sglang_fair.common.files import read_json
from sglang_fair.common.identity import DEFAULT_ORDER, MAX_NAME_CHARS, bounded
from sglang_fair.common.weights import Weights
from sglang_fair.core import POLICIES
from sglang_fair.core import options as policy_options
from sglang_fair.core.cost import Cost, Linear, describe, make_cost
from sglang_fair.core.payers import FIRST, RULES, make_payers
from sglang_fair.core.policy import Policy, checked_quantum

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
            "the quantum per client of DLPM (Q^u) and DRR, in service units (default 2000)"),
    Setting("--fair-options", "SGLANG_FAIR_OPTIONS", "KEY=VALUE,...",
            "the chosen policy's other options, for example patience=64 for dlpm (default: its own)"),
    Setting("--fair-cost", "SGLANG_FAIR_COST", "COST",
            "what service costs: linear, profiled, quadratic:d=1000, tiered:threshold=4096 or "
            "flops:/path/to/the/model/config.json (default linear)"),
    Setting("--fair-extend-weight", "SGLANG_FAIR_EXTEND_WEIGHT", "W_E",
            "units that one computed input token costs, with the linear cost (default 1)"),
    Setting("--fair-output-weight", "SGLANG_FAIR_OUTPUT_WEIGHT", "W_Q",
            "units that one output token costs, with the linear cost (default 2)"),
    Setting("--fair-payer", "SGLANG_FAIR_PAYER", "RULE",
            f"who pays for a prefix that clients share: {', '.join(RULES)} (default first: who computes it)"),
    Setting("--fair-client-weights", "SGLANG_FAIR_CLIENT_WEIGHTS", "JSON",
            'shares per client, for example {"gold": 2} (default 1 for everybody)'),
    Setting("--fair-identity", "SGLANG_FAIR_IDENTITY", "PLACES",
            f"where the client's name is looked for, comma separated (default {','.join(DEFAULT_ORDER)})"),
)  # fmt: skip

COST_VARIABLE = "SGLANG_FAIR_COST"

POLICY_VARIABLE = "SGLANG_FAIR_POLICY"
"""Chooses the policy where no --schedule-policy can be given; same names as --schedule-policy."""


@dataclass(frozen=True)
class Config:
    """Settings as the scheduler uses them."""

    quantum: float = 2000.0
    options: str = ""
    """The policy's own, as they were written; which there are depends on the policy."""
    cost: Cost = field(default_factory=Linear)
    client_weights: Mapping[str, float] | None = None
    payer: str = FIRST
    identity: tuple[str, ...] = DEFAULT_ORDER

    def policy(self, name: str) -> Policy:
        """A new policy object. ValueError for an unknown name, an option that it has not, or a bad value."""
        return policy_options.make(
            name, self.options, quantum=self.quantum, weights=Weights(self.client_weights)
        )

    def with_weights(self, weights: Mapping[str, float]) -> "Config":
        """With these weights in place of the same clients' old ones. ValueError for a bad one."""
        return replace(self, client_weights={**(self.client_weights or {}), **checked_weights(weights)})


MOST_WEIGHT = 1e6
"""Largest client weight, and one over the smallest: farther apart, the smaller share is none."""

REQUEST_KEYS = ("client_weights",)
"""What `POST /fair` can change while the server runs."""


def checked_weights(weights: object) -> dict[str, float]:
    """Client names to weights, from what an operator wrote. ValueError with one line for anything else."""
    if not isinstance(weights, Mapping):
        raise ValueError(f"client weights must map client names to numbers, not {weights!r:.80}")
    for client, weight in weights.items():
        if not isinstance(client, str) or not client.strip() or len(client) > MAX_NAME_CHARS:
            raise ValueError(f"a client's name has 1 to {MAX_NAME_CHARS} characters, {client!r:.150} has not")
        if bounded(client) != client:
            raise ValueError(f"client {client!r} is known here by the name {bounded(client)!r}")
        if type(weight) not in (int, float) or not 1 / MOST_WEIGHT <= weight <= MOST_WEIGHT:
            raise ValueError(
                f"weight of client {client!r} must be a positive number, from {1 / MOST_WEIGHT:g} to "
                f"{MOST_WEIGHT:g}, not {weight!r:.80}"
            )
    return {client: float(weight) for client, weight in weights.items()}


def requested_weights(body: object) -> dict[str, float]:
    """The weights in the body of a `POST /fair`. ValueError with one line for what it cannot ask."""
    if not isinstance(body, Mapping) or not body:
        raise ValueError(f"the body must be a JSON object with {', '.join(REQUEST_KEYS)}")
    unknown = [key for key in body if key not in REQUEST_KEYS]
    if unknown:
        raise ValueError(f"cannot change {unknown[0]!r:.150}; there is {', '.join(REQUEST_KEYS)}")
    return checked_weights(body["client_weights"])


def read(environ: Mapping[str, str] = os.environ) -> Config:
    """The settings in `environ`. ValueError names the variable that is wrong."""

    def number(variable: str) -> float | None:
        text = environ.get(variable)
        try:
            return float(text) if text else None
        except ValueError:
            raise ValueError(f"{variable} must be a number, not {text!r}") from None

    weights_text = environ.get("SGLANG_FAIR_CLIENT_WEIGHTS") or "{}"
    try:
        weights = json.loads(weights_text)
    except json.JSONDecodeError as error:
        raise ValueError(f"SGLANG_FAIR_CLIENT_WEIGHTS is not JSON: {error}") from None
    if not isinstance(weights, dict):
        raise ValueError(f"SGLANG_FAIR_CLIENT_WEIGHTS must map client names to numbers, not {weights_text}")
    quantum = number("SGLANG_FAIR_QUANTUM")
    make_payers(payer := environ.get("SGLANG_FAIR_PAYER") or FIRST)
    return Config(
        quantum=checked_quantum(Config.quantum if quantum is None else quantum),
        options=environ.get("SGLANG_FAIR_OPTIONS") or "",
        cost=make_cost(
            environ.get(COST_VARIABLE) or Linear.name,
            number("SGLANG_FAIR_EXTEND_WEIGHT"),
            number("SGLANG_FAIR_OUTPUT_WEIGHT"),
            read=read_json,
        ),
        client_weights=checked_weights(weights),
        payer=payer,
        identity=read_identity(environ),
    )


def read_identity(environ: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """The places where a client's name is looked for."""
    places = environ.get("SGLANG_FAIR_IDENTITY")
    return tuple(place.strip().lower() for place in places.split(",")) if places else DEFAULT_ORDER


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
    chosen = getattr(arguments, "schedule_policy", None)
    if chosen in SERVER_POLICIES:
        refuse_combinations(arguments)
    try:
        cost = check(read(environ), chosen).cost
    except ValueError as error:
        raise SystemExit(f"sglang-fair: {error}") from None
    if not isinstance(cost, Linear):
        environ[COST_VARIABLE] = describe(cost)  # no child depends on a file that the text may name


def check(config: Config, chosen: str | None) -> Config:
    """`config`, if the policy `chosen` by --schedule-policy can run with it; ValueError otherwise."""
    if chosen is not None and chosen in SERVER_POLICIES:
        config.policy(SERVER_POLICIES[chosen])
    elif config.options:
        raise ValueError(f"--fair-options are for a fair policy; {chosen} is SGLang's own")
    return config


def refuse_combinations(arguments: argparse.Namespace) -> None:
    """SystemExit for features that reorder or walk the queue behind a fair policy's back."""
    for attribute, harmless, flag in (
        ("enable_priority_scheduling", False, "--enable-priority-scheduling"),
        ("lora_drain_wait_threshold", 0.0, "--lora-drain-wait-threshold"),
        ("disaggregation_mode", "null", "--disaggregation-mode"),
    ):
        if getattr(arguments, attribute, harmless) not in (harmless, None):
            raise SystemExit(f"sglang-fair: {flag} cannot be combined with a fair policy")
