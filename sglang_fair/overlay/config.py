"""A replica's fairness settings, from SGLang's command line or from the environment.

SGLang starts its scheduler in another process. So an argument is written to the environment when the command line is
read, and every child finds it there. An argument wins over the environment.
"""

import argparse
import os
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, replace
from functools import cached_property

from sglang_fair.common.fields import Facts
from sglang_fair.common.files import read_json
from sglang_fair.common.identity import DEFAULT_ORDER, MAX_NAME_CHARS, bounded
from sglang_fair.common.interaction import Apps, make_apps
from sglang_fair.common.weights import MOST_WEIGHT, Weights
from sglang_fair.core import POLICIES
from sglang_fair.core import options as policy_options
from sglang_fair.core.cost import Cost, Linear, make_cost
from sglang_fair.core.payers import make_payers
from sglang_fair.core.policy import Policy, checked_quantum
from sglang_fair.core.steps import checked_stall_ms, checked_target_tpot_ms
from sglang_fair.settings.setting import Setting, help_text, settings_of
from sglang_fair.settings.table import Fairness

STOCK_POLICIES = ("lpm", "random", "fcfs", "dfs-weight", "lof", "priority", "routing-key", "hrrn")
"""Names that keep SGLang's own meaning after --schedule-policy."""


def server_name(policy: str) -> str:
    """Our policy's name after --schedule-policy. Stock SGLang refuses it: a lost overlay cannot go unseen."""
    return f"fair-{policy}" if policy in STOCK_POLICIES else policy


SERVER_POLICIES: Mapping[str, str] = {server_name(name): name for name in POLICIES}
"""--schedule-policy value to the name in `POLICIES`."""


SETTINGS: Mapping[str, Setting] = {
    name: setting for name, setting in settings_of(Fairness).items() if setting.argument
}
"""The settings that SGLang's server takes as --fair arguments and in the environment, by field."""

POLICY_VARIABLE = "SGLANG_FAIR_POLICY"
"""Chooses the policy where no --schedule-policy can be given; same names as --schedule-policy."""


@dataclass(frozen=True, kw_only=True)
class Config(Fairness):
    """Settings as the scheduler uses them. ValueError for a bad one."""

    def __post_init__(self) -> None:
        if self.quantum is not None:
            checked_quantum(self.quantum)
        make_payers(self.payer)
        checked_target_tpot_ms(self.target_tpot_ms, checked_stall_ms(self.stall_ms))
        checked_weights(self.client_weights)
        _ = self.charges, self.facts

    @cached_property
    def charges(self) -> Cost:
        """What service costs."""
        return make_cost(self.cost or Linear.name, self.extend_weight, self.output_weight)

    @cached_property
    def facts(self) -> Facts:
        """What clients may ask; the vocabulary is the model's."""
        return Facts.allowing(self.max_logprobs, self.allow_fields)

    def read_apps(self) -> Apps:
        """Which applications clients may name. ValueError for a file that says something else."""
        return Apps() if self.apps is None else make_apps(read_json(self.apps), self.apps)

    def make_policy(self, name: str) -> Policy:
        """A new policy object. ValueError for an unknown name, an option that it has not, or a bad value."""
        return policy_options.make(
            name,
            policy_options.shipped(name, self.policy_options),
            quantum=self.quantum,
            weights=Weights(self.client_weights),
        )

    def mixes(self, policy: str) -> bool:
        """Whether steps for prompts are to have a token for each running request under one of `POLICIES`."""
        return self.mixed_chunk != "off" and self.stall_ms > 0 and POLICIES[policy].shares_steps

    def with_weights(self, weights: Mapping[str, float]) -> "Config":
        """With these weights in place of the same clients' old ones. ValueError for a bad one."""
        return replace(self, client_weights={**self.client_weights, **checked_weights(weights)})


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
    given = {
        name: setting.read(text, setting.variable)
        for name, setting in SETTINGS.items()
        if (text := environ.get(setting.variable))
    }
    if "client_weights" in given:
        given["client_weights"] = checked_weights(given["client_weights"])
    return Config(**given)


def read_identity(environ: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """The places where a client's name is looked for."""
    places = environ.get(SETTINGS["identity"].variable)
    return tuple(place.strip().lower() for place in places.split(",")) if places else DEFAULT_ORDER


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Our arguments on SGLang's parser, and our policies among the choices of --schedule-policy."""
    for action in parser._actions:
        if "--schedule-policy" in action.option_strings:
            action.choices = [*(action.choices or ()), *SERVER_POLICIES]
    group = parser.add_argument_group("fair scheduling (sglang-fair)")
    for setting in SETTINGS.values():
        text = f"{help_text(setting)} Environment: {setting.variable}."
        group.add_argument(setting.argument, metavar=setting.metavar, help=text.replace("%", "%%"))


UNMIXED = (
    "speculative_algorithm", "pp_size", "enable_pdmux", "enable_hisparse", "enable_prefill_cp",
    "enable_megamoe_for_layernorm_sp", "enable_encoder_swa_bounded_replay",
)  # fmt: skip
"""Arguments of SGLang with which it refuses mixed chunks, or with which steps are not formed one after the other."""


def adopt_arguments(arguments: argparse.Namespace, environ: MutableMapping[str, str] = os.environ) -> None:
    """Move the given arguments into `environ`, and the policy out of it. SystemExit on a bad value."""
    for setting in SETTINGS.values():
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
        refuse_combinations(arguments, environ)
    try:
        config = check(read(environ), chosen)
    except ValueError as error:
        raise SystemExit(f"sglang-fair: {error}") from None
    ours = SERVER_POLICIES.get(chosen or "")
    if (
        ours
        and config.mixes(ours)
        and all(getattr(arguments, name, None) in (None, False, 1) for name in UNMIXED)
    ):
        arguments.enable_mixed_chunk = True


def check(config: Config, chosen: str | None) -> Config:
    """`config`, if the policy `chosen` by --schedule-policy can run with it; ValueError otherwise."""
    config.read_apps()
    if chosen is not None and chosen in SERVER_POLICIES:
        policy = config.make_policy(SERVER_POLICIES[chosen])
        policy_options.check_together(policy, config.charges, config.payer)
    elif config.policy_options:
        raise ValueError(f"--fair-options are for a fair policy; {chosen} is SGLang's own")
    return config


RUST_SERVER_VARIABLE = "SGLANG_RUST_SERVER"
"""SGLang's own: its HTTP server is then one in Rust."""

TRUE_WORDS = ("true", "1", "yes", "y")
"""What SGLang takes for true in a variable."""


def refuse_combinations(arguments: argparse.Namespace, environ: Mapping[str, str]) -> None:
    """SystemExit for what forms batches, or reorders the queue, behind a fair policy's back, and for front ends that
    would let clients say themselves who they are."""
    used = [
        flag
        for attribute, harmless, flag in (
            ("enable_priority_scheduling", False, "--enable-priority-scheduling"),
            ("lora_drain_wait_threshold", 0.0, "--lora-drain-wait-threshold"),
            ("disaggregation_mode", "null", "--disaggregation-mode"),
            ("dllm_algorithm", None, "--dllm-algorithm"),
            ("grpc_mode", False, "--grpc-mode"),
            ("smg_grpc_mode", False, "--smg-grpc-mode"),
        )
        if getattr(arguments, attribute, harmless) not in (harmless, None)
    ]
    if environ.get(RUST_SERVER_VARIABLE, "").lower() in TRUE_WORDS:
        used.append(f"{RUST_SERVER_VARIABLE}={environ[RUST_SERVER_VARIABLE]}")
    if used:
        raise SystemExit(f"sglang-fair: {used[0]} cannot be combined with a fair policy")
