"""What the fleet is told by the cluster that starts it, and what it asks Ray for. Pure.

A replica's bundle is what Ray keeps free for it on one node: a GPU for each of its ranks and one CPU, unless
`--ray-resources CPU=8,GPU=2,memory=64e9,NAME=1` says otherwise, resource by resource.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from sglang_fair.cluster.options import ConfigError, Device, Options, gpus_per_replica
from sglang_fair.cluster.plan import Asked, FleetFiles
from sglang_fair.common.pairs import split_pairs
from sglang_fair.common.processes import PARENT
from sglang_fair.common.service_keys import admin_key, feeder_key

CPU, GPU, MEMORY = "CPU", "GPU", "memory"

CARRIED = ("SGLANG_", "HF_")
"""Replicas get the variables that begin so from the cluster's environment; all others are their node's."""

KEPT = (PARENT, admin_key.variable, feeder_key.variable)
"""Of these, what is no replica's business."""


@dataclass(frozen=True)
class Told:
    """What the fleet is told. `listed` is the file of replicas, `control` the socket on which changes are asked for."""

    address: str
    bundle: dict[str, float]
    wait_s: float
    replicas: tuple[Asked, ...]
    loads: bool
    """Whether replicas say how much they have to do."""
    listed: str
    control: str
    quiet: bool
    """Whether only warnings and errors of the replicas' output are shown."""
    keys: str | None
    """The folder with those for the router."""
    replica_ca: str | None
    """The file with those who sign replicas' certificates."""
    router: str
    """Which is asked whether a replica that is drained has finished."""

    def encode(self) -> bytes:
        """As `decode` reads it."""
        return msgspec.json.encode(self)

    @staticmethod
    def decode(raw: bytes) -> "Told":
        """Raises `msgspec.ValidationError` for anything else."""
        return msgspec.json.decode(raw, type=Told)


def of(options: Options, device: Device, replicas: tuple[Asked, ...], files: FleetFiles, router: str) -> Told:
    """What the fleet of this cluster is told. Raises ConfigError."""
    assert options.ray is not None
    return Told(
        address=options.ray,
        bundle=bundle(options, device),
        wait_s=options.ray_wait_s,
        replicas=replicas,
        loads=options.needs_loads(),
        listed=str(files.listed),
        control=str(files.control),
        quiet=options.quiet_replicas,
        keys=options.keys,
        replica_ca=options.replica_ca,
        router=router,
    )


def device(wanted: str) -> Device:
    """What replicas on the nodes compute on: GPUs, unless --device or --engine says otherwise."""
    return "cpu" if wanted == "cpu" else "cuda"


def bundle(options: Options, device: Device) -> dict[str, float]:
    """What one replica is given. Raises ConfigError."""
    found = {CPU: 1.0}
    if device == "cuda":
        found[GPU] = float(gpus_per_replica(options.extra))
    try:
        for name, text in split_pairs(options.ray_resources, "resource"):
            found[name] = _amount(name, text)
    except ValueError as error:
        raise ConfigError(f"--ray-resources: {error}", "ray_resources") from None
    if device == "cuda" and found[GPU] != gpus_per_replica(options.extra):
        raise ConfigError(
            f"--ray-resources: a replica with these arguments has {gpus_per_replica(options.extra)} ranks, each with "
            f"a GPU of its own, not {found[GPU]:g}",
            "ray_resources",
        )
    return {name: amount for name, amount in found.items() if amount}


def _amount(name: str, text: str) -> float:
    try:
        amount = float(text)
    except ValueError:
        amount = -1.0
    if not 0 <= amount < float("inf"):
        raise ValueError(f"{name}={text} is not an amount")
    return amount


def check(options: Options) -> None:
    """Raises ConfigError for options that do not go together with or without --ray."""
    if options.ray is None:
        for field in ("ray_resources", "replica_ca"):
            if getattr(options, field):
                raise ConfigError(f"--{field.replace('_', '-')} is for --ray", field)
        return
    if options.ray.startswith("ray://"):
        raise ConfigError(
            "--ray takes auto or HOST:PORT of a cluster that this machine is a node of (ray start --address HOST:PORT "
            "--num-cpus 0 makes it one that runs no replica), not Ray Client's ray://",
            "ray",
        )
    if options.swap != "none":
        raise ConfigError("--swap is not there with --ray: agents run beside replicas on one machine", "swap")
    if options.scale_up:
        raise ConfigError("--scale-up is not there with --ray: use sglang-fair workers add", "scale_up")
    wanted = {"auto": options.device, "emulated": "cpu"}.get(options.engine, options.engine)
    bundle(options, device(wanted))


def carried(environment: Mapping[str, str]) -> dict[str, str]:
    """Of the cluster's environment, what a replica on another machine gets."""
    return {
        name: value for name, value in environment.items() if name.startswith(CARRIED) and name not in KEPT
    }


def shortage(
    address: str, count: int, one: Mapping[str, float], nodes: Mapping[str, Mapping[str, float]],
    free: Mapping[str, float], wait_s: float,
) -> str:  # fmt: skip
    """Why there is no room for `count` replicas of the bundle `one`, in a line: `nodes` are what each node has in all,
    `free` is what all of them have left."""
    has = "; ".join(f"{node} has {amounts(total)}" for node, total in nodes.items()) or "it has no nodes"
    return (
        f"the Ray cluster at {address} has no room for {count} x ({amounts(one)}) within {wait_s:g} s: {has}; free are "
        f"{amounts({name: free.get(name, 0.0) for name in one})} in all (--replicas, --ray-resources, --ray-wait)"
    )


def amounts(resources: Mapping[str, float]) -> str:
    """Resources in words. Ray's own marks of nodes are left out."""
    return ", ".join(
        f"{name} {_number(amount)}"
        for name, amount in sorted(resources.items(), key=lambda one: (one[0] not in (CPU, GPU), one[0]))
        if name != "object_store_memory" and not name.startswith("node:")
    ) or "nothing"  # fmt: skip


def _number(amount: float) -> str:
    return f"{amount / 1e9:.1f}e9" if amount >= 1e9 else f"{amount:g}"


def actor_options(one: Mapping[str, float]) -> dict[str, Any]:
    """A bundle as an actor's options say it."""
    rest = {name: amount for name, amount in one.items() if name not in (CPU, GPU, MEMORY)}
    return {
        "num_cpus": one.get(CPU, 0),
        "num_gpus": one.get(GPU, 0),
        **({"memory": one[MEMORY]} if MEMORY in one else {}),
        **({"resources": rest} if rest else {}),
    }
