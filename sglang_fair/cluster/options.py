"""What the operator asks for, and whether it can be meant: checked before anything is started. PURE, but for
the file that a cost model may be read from."""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from router.gateway import limits
from router.placement import build, parse_options
from sglang_fair.common.files import read_json
from sglang_fair.common.weights import Weights
from sglang_fair.core import POLICIES, make_policy
from sglang_fair.core import options as policy_options
from sglang_fair.core.cost import Cost, make_cost
from sglang_fair.core.payers import FIRST, make_payers
from sglang_fair.sim.emulation import Emulation

Device = Literal["cpu", "cuda"]

DEVICES = ("auto", "cpu", "cuda")
ENGINES = ("auto", "cuda", "cpu", "emulated")
LOG_LEVELS = ("debug", "info", "warning", "error")

STOCK_PREFIX = "sglang:"
"""Before a policy name: SGLang's own policy of that name, without the fair scheduler."""

OURS: Mapping[str, str] = {
    "--host": "--host",
    "--port": "--port",
    "--device": "--device",
    "--model": "--model",
    "--model-path": "--model",
    "--schedule-policy": "--policy",
    "--kv-events-config": "",
    "--served-model-name": "",
}
"""SGLang arguments that the cluster sets itself -> the option of ours to use instead, "" for none."""


class ConfigError(ValueError):
    """The operator asked for something that cannot be; the text is one line that says what."""


@dataclass(frozen=True)
class Options:
    """One cluster as asked for. Quanta and weights are in service units (see `core.cost`)."""

    replicas: int = 2
    device: str = "auto"
    engine: str = "auto"
    """What computes; auto: as `device` says."""
    model: str = "default"
    gpu: str | None = None
    """Of an emulated engine, as are the two below."""
    cost_model: str | None = None
    time_scale: float = 1.0
    policy: str = "dlpm"
    policy_options: str = ""
    """The policy's own, as `core.options` reads them."""
    payer: str = FIRST
    """Who pays for a prefix that clients share."""
    placement: str = "d2lpm"
    placement_options: str = ""
    """Its other parameters, as `router.placement.parse_options` reads them."""
    identity: str | None = None
    """Where a client's name is looked for; None: the gateway's default."""
    host: str = "127.0.0.1"
    port: int = 8000
    """Of the gateway; 0 takes a free one."""
    quantum: float = 2000.0
    worker_quantum: float | None = None
    """None: the router's own default."""
    cost: str = "linear"
    extend_weight: float | None = None
    """With the linear cost; None: its default."""
    output_weight: float | None = None
    client_weights: Mapping[str, float] = field(default_factory=dict)
    gateway_workers: int = 1
    """Processes of the gateway."""
    gateway_options: str = ""
    """Its limits, as `router.gateway.limits` reads them."""
    log_level: str = "info"
    start_timeout_s: float | None = None
    """Longest wait for one process to become ready; None: reckoned from the machine and the model."""
    extra: tuple[str, ...] = ()
    """Arguments for every replica's SGLang server."""

    def emulation(self) -> Emulation | None:
        """What the replicas emulate, None for a real engine; raises `ConfigError`."""
        given = [
            option
            for option, value, unset in (
                ("--gpu", self.gpu, None),
                ("--cost-model", self.cost_model, None),
                ("--time-scale", self.time_scale, 1.0),
            )
            if value != unset
        ]
        if self.engine != "emulated":
            if given:
                raise ConfigError(f"{given[0]} is for --engine emulated")
            return None
        try:
            emulation = Emulation(self.gpu or "", self.model, self.cost_model, self.time_scale)
            emulation.make_cost(read_json)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        return emulation

    def service_cost(self) -> Cost:
        """What service costs in the replicas; raises ValueError."""
        return make_cost(self.cost, self.extend_weight, self.output_weight, read=read_json)


def parse_client_weights(text: str) -> dict[str, float]:
    """`{"client": share, ...}` from JSON. Raises `ConfigError`."""
    try:
        weights = json.loads(text or "{}")
    except json.JSONDecodeError as error:
        raise ConfigError(f"--client-weights is not JSON: {error}") from None
    if not isinstance(weights, dict) or not all(type(share) in (int, float) for share in weights.values()):
        raise ConfigError(f"--client-weights must map client names to numbers, not {text}")
    return weights


def check(options: Options, placements: Collection[str]) -> None:
    """Raises `ConfigError` for the first thing in `options` that is wrong whatever the machine."""
    for option, count in (("--replicas", options.replicas), ("--gateway-workers", options.gateway_workers)):
        if count < 1:
            raise ConfigError(f"{option} must be at least 1, not {count}")
    for option, value, known in (
        ("--device", options.device, DEVICES),
        ("--engine", options.engine, ENGINES),
        ("--placement", options.placement, placements),
        ("--log-level", options.log_level, LOG_LEVELS),
    ):
        if value not in known:
            raise ConfigError(f"unknown {option} {value!r}; there are {', '.join(known)}")
    if options.policy not in POLICIES and not options.policy.startswith(STOCK_PREFIX):
        raise ConfigError(
            f"unknown --policy {options.policy!r}; there are {', '.join(POLICIES)}, "
            f"and {STOCK_PREFIX}NAME for SGLang's own"
        )
    if not 0 <= options.port <= 65535:
        raise ConfigError(f"--port must lie from 0 to 65535, not {options.port}")
    for option, number in (
        ("--worker-quantum", options.worker_quantum),
        ("--start-timeout", options.start_timeout_s),
    ):
        if number is not None and not number > 0:
            raise ConfigError(f"{option} must be above 0, not {number}")
    options.emulation()
    if options.engine not in ("auto", "emulated") and options.device not in ("auto", options.engine):
        raise ConfigError(f"--engine {options.engine} and --device {options.device} contradict each other")
    if options.engine == "emulated" and options.device == "cuda":
        raise ConfigError("--engine emulated needs no GPU: leave --device out")
    if options.engine == "emulated" and gpus_per_replica(options.extra) > 1:
        raise ConfigError("an emulated replica is one GPU: leave --tp and --pp out")
    try:
        options.service_cost()
        _check_policy(options)
        build(options.placement, **parse_options(options.placement_options))
        limits.parse(options.gateway_options)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    _check_extra(options.extra)


def _check_policy(options: Options) -> None:
    weights = Weights(options.client_weights)
    if not options.policy.startswith(STOCK_PREFIX):
        policy_options.make(options.policy, options.policy_options, quantum=options.quantum, weights=weights)
    elif options.policy_options:
        raise ConfigError(f"--policy-options are for a fair policy; {options.policy} is SGLang's own")
    make_payers(options.payer)
    make_policy("dlpm", quantum=options.quantum, weights=weights)  # whether or not the policy uses them


def extra_argument(extra: Sequence[str], *names: str) -> str | None:
    """The value that `extra` gives an argument, as `--name value` or `--name=value`; the last one wins."""
    value = None
    for position, word in enumerate(extra):
        name, equals, inline = word.partition("=")
        if name not in names:
            continue
        if not equals and position + 1 == len(extra):
            raise ConfigError(f"{name} needs a value")
        value = inline if equals else extra[position + 1]
    return value


def extra_number(extra: Sequence[str], default: int, *names: str) -> int:
    """Like `extra_argument`, for one that is a whole number from 1."""
    text = extra_argument(extra, *names)
    if text is None:
        return default
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"{names[0]} must be a whole number from 1, not {text!r}")
    return int(text)


def gpus_per_replica(extra: Sequence[str]) -> int:
    """GPUs that one replica spreads over: tensor times pipeline parallelism."""
    tensor = extra_number(extra, 1, "--tp", "--tp-size", "--tensor-parallel-size")
    return tensor * extra_number(extra, 1, "--pp", "--pp-size", "--pipeline-parallel-size")


def page_tokens(extra: Sequence[str]) -> int:
    """Tokens in a block of a replica's cache; the router must count in the same blocks."""
    return extra_number(extra, 16, "--page-size")


def _check_extra(extra: Sequence[str]) -> None:
    if extra and not extra[0].startswith("-"):
        raise ConfigError(f"unexpected argument {extra[0]!r}; SGLang's arguments follow --")
    for word in extra:
        name = word.partition("=")[0]
        if name in OURS:
            instead = f"use {OURS[name]} before the --" if OURS[name] else "it cannot be given"
            raise ConfigError(f"the cluster sets {name} of each replica itself; {instead}")
    page_tokens(extra)
    gpus_per_replica(extra)
    if extra_number(extra, 1, "--dp", "--dp-size", "--data-parallel-size") > 1:
        raise ConfigError("--dp inside a replica would hide workers from the router; use --replicas")
