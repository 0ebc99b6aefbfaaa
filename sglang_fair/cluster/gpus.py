"""Which GPUs this machine has, which of them may be used, and which of those each replica gets.

Two clusters on one machine never share a GPU: each takes those that it uses, under their UUIDs (`ports.Marks`), and
so do its replicas. A GPU is free again when they have ended, however they did.

A replica is told its GPUs by number, in the order of nvidia-smi (`ENVIRONMENT`): with tensor parallelism SGLang 0.5.23
reads CUDA_VISIBLE_DEVICES as numbers of that order, and fails on anything else. A MIG device has no number. It goes by
its UUID, and to replicas of one GPU alone: CUDA shows a process one MIG device only.
"""

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sglang_fair.cluster.options import ConfigError, Device, Options, gpus_per_replica
from sglang_fair.cluster.ports import Marks
from sglang_fair.common.provenance import cores

ENVIRONMENT: Mapping[str, str] = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
"""Numbers mean what they mean to nvidia-smi. CUDA's own order begins with the fastest GPU."""

_GPU = re.compile(r"GPU (\d+): .*\(UUID: (\S+)\)")
_MIG = re.compile(r"\s+MIG .*\(UUID: (\S+)\)")


class GpusTaken(RuntimeError):
    """Other clusters on this machine have the GPUs that are asked for."""


@dataclass(frozen=True)
class Gpu:
    """A GPU, or a MIG device: what a replica can be given."""

    name: str
    """As CUDA_VISIBLE_DEVICES takes it: a number, or the UUID of a MIG device."""
    uuid: str
    card: str = ""
    """The UUID of the GPU that it is, or a part of."""

    @property
    def is_part(self) -> bool:
        return not self.name.isdecimal()


Cards = Sequence[tuple[int, tuple[Gpu, ...]]]
"""GPUs by their numbers: each itself, or the MIG devices of one that is divided."""


@dataclass(frozen=True)
class Machine:
    """What a cluster can run on. `gpus` are those that CUDA_VISIBLE_DEVICES allows, also where others use them."""

    cores: int
    gpus: tuple[Gpu, ...]
    cuda_build: bool
    """Whether the SGLang that is installed has its GPU kernels."""
    python: str


def look(environ: Mapping[str, str] = os.environ) -> Machine:
    return Machine(
        cores=cores(),
        gpus=visible(listed(_nvidia_smi()), environ.get("CUDA_VISIBLE_DEVICES")),
        cuda_build=importlib.util.find_spec("sgl_kernel") is not None,
        python=sys.executable,
    )


def _nvidia_smi() -> str:
    """The list of GPUs; empty if there is none."""
    try:
        found = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return found.stdout if found.returncode == 0 else ""


def listed(text: str) -> Cards:
    """Those in the output of `nvidia-smi -L`."""
    cards: list[tuple[int, str, list[str]]] = []
    for line in text.splitlines():
        if found := _GPU.match(line):
            cards.append((int(found[1]), found[2], []))
        elif (found := _MIG.match(line)) and cards:
            cards[-1][2].append(found[1])
    return tuple(
        (number, tuple(Gpu(part, part, uuid) for part in parts) or (Gpu(str(number), uuid, uuid),))
        for number, uuid, parts in cards
    )


def visible(cards: Cards, cuda_visible_devices: str | None) -> tuple[Gpu, ...]:
    """Those that may be used, in the order in which they are named; without CUDA_VISIBLE_DEVICES all.

    A name is a number of nvidia-smi's, a UUID, or the beginning of one UUID alone. As CUDA does: what stands behind a
    name of nothing, such as -1, does not count, and the name of a divided GPU means its first MIG device.
    """
    if cuda_visible_devices is None:
        return tuple(gpu for _, gpus in cards for gpu in gpus)
    named = {uuid: gpu for _, gpus in cards for gpu in reversed(gpus) for uuid in (gpu.uuid, gpu.card)}
    found: dict[str, Gpu] = {}
    for name in map(str.strip, cuda_visible_devices.split(",")):
        if name.isdecimal():
            matches = [gpus[0] for number, gpus in cards if number == int(name)]
        else:
            is_uuid = name.startswith(("GPU-", "MIG-"))
            matches = [gpu for uuid, gpu in named.items() if is_uuid and uuid.startswith(name)]
        if len(matches) != 1:
            break
        found.setdefault(matches[0].uuid, matches[0])
    return tuple(found.values())


def take(options: Options, device: Device, gpus: Sequence[Gpu], marks: Marks) -> tuple[tuple[Gpu, ...], ...]:
    """The GPUs of each replica, the first of `gpus` that are free, all or none of them taken in `marks`; none for
    replicas on a CPU. Raises `ConfigError` where so many are not visible, `GpusTaken` where they are not free."""
    if device == "cpu":
        return ()
    each = gpus_per_replica(options.extra)
    usable = [gpu for gpu in gpus if each == 1 or not gpu.is_part]
    wanted = options.replicas * each
    needs = f"{_counted(options.replicas, 'replica')} with {_counted(each, 'GPU')} each need {_counted(wanted, 'GPU')}"
    if wanted > len(usable):
        parts = len(gpus) - len(usable)
        besides = f", besides {parts} MIG devices, which serve one process each" if parts else ""
        raise ConfigError(f"{needs}, {len(usable)} are visible{besides}")
    taken: list[Gpu] = []
    for gpu in usable:
        if len(taken) < wanted and marks.take(gpu.uuid):
            taken.append(gpu)
    if len(taken) < wanted:
        marks.give_back(*(gpu.uuid for gpu in taken))
        raise GpusTaken(
            f"{needs}; of {len(usable)} that are visible {len(taken)} are free, and clusters on this machine have "
            "the others"
        )
    return tuple(tuple(taken[at : at + each]) for at in range(0, wanted, each))


def environment(gpus: Sequence[Gpu]) -> dict[str, str]:
    """What a replica's environment must say so that it uses these; empty for a replica without GPUs."""
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpu.name for gpu in gpus), **ENVIRONMENT} if gpus else {}


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
