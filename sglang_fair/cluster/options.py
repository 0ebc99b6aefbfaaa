"""What the operator asks for, and whether it can be done: checked before anything is started.

Pure, except that a cost or a cost model may be read from a file.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from router.batches.folder import check as check_batches
from router.gateway.settings import check as check_gateway
from router.gateway.settings import limits_in
from router.placement import build, parameters, parse_options, plans
from sglang_fair.cluster import models
from sglang_fair.common.deadlines import DEFAULT_CLASSES
from sglang_fair.common.files import read_json
from sglang_fair.common.weights import Weights
from sglang_fair.core import make_policy
from sglang_fair.core import options as policy_options
from sglang_fair.core.cost import Cost, make_cost
from sglang_fair.core.payers import make_payers
from sglang_fair.core.policy import Policy
from sglang_fair.core.throttle import make_rules
from sglang_fair.settings import setting
from sglang_fair.settings.program import shared
from sglang_fair.settings.setting import SettingError as ConfigError
from sglang_fair.settings.table import FINISH_S, STOCK_PREFIX, Cluster, Gateway
from sglang_fair.sim.emulation import Emulation

__all__ = ["ConfigError", "Device", "Options", "check"]

Device = Literal["cpu", "cuda"]

USUAL = "d2lpm-queue"
"""The placement where there are no deadlines and no models to load."""

LONGEST_FINISH_S = 1e9
"""In place of inf, which JSON has not."""

OURS: Mapping[str, str] = {
    "--host": "--host",
    "--port": "--port",
    "--device": "--device",
    "--model": "--model",
    "--model-path": "--model",
    "--schedule-policy": "--policy",
    "--kv-events-config": "",
    "--served-model-name": "--models",
}
"""SGLang arguments that the cluster sets itself -> the option of ours to use instead, "" for none."""

NOT_HERE: Mapping[str, str] = {
    "--base-gpu-id": "a replica sees its own GPUs only; say in CUDA_VISIBLE_DEVICES which the cluster may use",
    "--gpu-id-step": "a replica sees its own GPUs only; say in CUDA_VISIBLE_DEVICES which the cluster may use",
    "--nnodes": "all replicas of a cluster run on this machine; start those that span several by themselves",
    "--node-rank": "all replicas of a cluster run on this machine; start those that span several by themselves",
    "--dist-init-addr": "all replicas would listen there; each finds an address of its own",
    "--nccl-port": "all replicas would listen there; each has a port of its own",
    "--pp": "several of SGLang's arguments begin so; write --pp-size",
}
"""SGLang arguments that no replica of a cluster can be given, and why."""

TENSOR = ("--tp", "--tp-size", "--tensor-parallel-size")
PIPELINE = ("--pp-size", "--pipeline-parallel-size")
DATA = ("--dp", "--dp-size", "--data-parallel-size")

READ = {*OURS, *NOT_HERE, *TENSOR, *PIPELINE, *DATA, "--page-size"}
"""The SGLang arguments that matter to a cluster. SGLang would also take the beginning of a name."""

SHORTEST_BEGINNING = len("--base")


@dataclass(frozen=True, kw_only=True)
class Options(Cluster):
    """One cluster as asked for. Quanta and weights are in service units (see `core.cost`)."""

    def __post_init__(self) -> None:
        if self.placement is None:
            has_deadlines = self.swap != "none" or dict(self.slo_classes) != dict(DEFAULT_CLASSES)
            object.__setattr__(self, "placement", "deadline" if has_deadlines else USUAL)

    def placement_name(self) -> str:
        """That which was asked for, or follows from what else was."""
        assert self.placement is not None
        return self.placement

    def model_names(self) -> dict[str, str]:
        """What each model is called, and what --model would be for it; "" is the name of --model itself. Raises
        ConfigError."""
        return dict(models.deal(self).models)

    def emulation(self) -> Emulation | None:
        """What the replicas emulate, the first of them if they differ; None for a real engine. Raises ConfigError."""
        emulated_only = (
            ("gpu", self.gpu is not None),
            ("cost_model", self.cost_model is not None),
            ("time_scale", self.time_scale != 1.0),
        )
        if self.engine != "emulated":
            for field, given in emulated_only:
                if given:
                    raise ConfigError(f"--{field.replace('_', '-')} is for --engine emulated", field)
            return None
        asked = self.model_names().values()
        if self.cost_model is not None and len(asked) > 1:
            raise ConfigError("--cost-model is of one model, and --models names several", "cost_model")
        try:
            emulations = [
                Emulation(self.gpu or "", model, self.cost_model, self.time_scale) for model in asked
            ]
            for emulation in emulations:
                emulation.make_cost(read_json)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        return emulations[0]

    def needs_loads(self) -> bool:
        """Whether the router has to know how large replicas' caches are, and how full."""
        return self.throttle == "oit" or plans(self.placement_name())

    def service_cost(self) -> Cost:
        """What service costs in the replicas. Raises ValueError."""
        return make_cost(self.cost or "linear", self.extend_weight, self.output_weight)

    def scheduler(self) -> Policy | None:
        """The policy of the replicas; None: SGLang's own. Raises ValueError."""
        if self.policy.startswith(STOCK_PREFIX):
            return None
        weights = Weights(self.client_weights)
        return policy_options.make(self.policy, self.policy_options, quantum=self.quantum, weights=weights)

    def placement_parameters(self) -> dict[str, Any]:
        """The placement's. One that can use it is told that replicas take requests back for urgent ones, and for how
        long streams go on at one that is to load another model."""
        policy, known = self.scheduler(), parameters(self.placement_name())
        found: dict[str, Any] = {}
        if policy is not None and policy.evictions > 0 and "evicts" in known:
            found["evicts"] = True
        if self.swap_finish_s != FINISH_S and "finish_s" in known:
            found["finish_s"] = min(self.swap_finish_s, LONGEST_FINISH_S)
        return found | parse_options(self.placement_options)


def check(options: Options) -> None:
    """Raises ConfigError for the first thing in `options` that is wrong on any machine."""
    setting.check(options)
    models.deal(options)
    options.emulation()
    if options.engine not in ("auto", "emulated") and options.device not in ("auto", options.engine):
        raise ConfigError(
            f"--engine {options.engine} and --device {options.device} contradict each other", "engine"
        )
    if options.engine == "emulated" and options.device == "cuda":
        raise ConfigError("--engine emulated needs no GPU: leave --device out", "device")
    if options.engine == "emulated" and gpus_per_replica(options.extra) > 1:
        raise ConfigError("an emulated replica is one GPU: leave --tp and --pp-size out", "extra")
    checks: tuple[tuple[str, Callable[[], object]], ...] = (
        ("cost", options.service_cost),
        # Whether or not the policy uses them:
        ("client_weights", lambda: make_policy("dlpm", weights=Weights(options.client_weights))),
        ("quantum", lambda: make_policy("dlpm", quantum=options.quantum)),
        ("limits", lambda: _check_limits(options)),
        ("policy_options", lambda: _check_policy(options)),
        ("payer", lambda: make_payers(options.payer)),
        (
            "placement_options",
            lambda: build(options.placement_name(), **parse_options(options.placement_options)),
        ),
        ("gateway_options", lambda: limits_in(options.gateway_options)),
        ("batches", lambda: _check_batches(options)),
    )
    for field, make in checks:
        try:
            make()
        except ValueError as error:
            raise ConfigError(str(error), field) from None
    if options.scale_up and not plans(options.placement_name()):
        raise ConfigError(
            "--scale-up is for --placement deadline or qlm, which say what is missing", "scale_up"
        )
    _check_extra(options.extra)
    known = {name: value for name, value in shared(options, Gateway).items() if value is not None}
    known["keys"] = None  # which are made later, if there are none
    own = {"router": ("tcp://127.0.0.1:1",), "model_name": "default", "tokenizer": "."}
    check_gateway(Gateway(**known | own))


def _check_batches(options: Options) -> None:
    if options.batches is not None:
        check_batches(options.batches, options.batch_files)


def _check_limits(options: Options) -> None:
    if options.limits is None:
        return
    if options.throttle == "none":
        raise ConfigError("--limits are for --throttle oit or rpm")
    make_rules(read_json(options.limits), f"--limits {options.limits}")


def _check_policy(options: Options) -> None:
    if (policy := options.scheduler()) is not None:
        policy_options.check_together(policy, options.service_cost(), options.payer)
    elif options.policy_options:
        raise ConfigError(f"--policy-options are for a fair policy; {options.policy} is SGLang's own")


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
    text = extra_argument(extra, *names)
    if text is None:
        return default
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"{names[0]} must be a whole number from 1, not {text!r}")
    return int(text)


def gpus_per_replica(extra: Sequence[str]) -> int:
    """GPUs that one replica spreads over: tensor times pipeline parallelism."""
    return extra_number(extra, 1, *TENSOR) * extra_number(extra, 1, *PIPELINE)


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
        if name in NOT_HERE:
            raise ConfigError(f"{name} cannot be given: {NOT_HERE[name]}")
        for whole in READ:
            if name not in READ and len(name) >= SHORTEST_BEGINNING and whole.startswith(name):
                raise ConfigError(f"write {whole} in full, not {name}")
    page_tokens(extra)
    gpus_per_replica(extra)
    if extra_number(extra, 1, *DATA) > 1:
        raise ConfigError("--dp inside a replica would hide workers from the router; use --replicas")
