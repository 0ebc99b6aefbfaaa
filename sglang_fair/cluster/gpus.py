"""Which GPUs this machine has, which of them may be used, and which of those each replica gets.

Two clusters on one machine never share a GPU: each takes those that it uses, under their UUIDs (`ports.Marks`), and
so do its replicas. A GPU is free again when they have ended, however they did.

A replica is told its GPUs by number, in the order of nvidia-smi (`ENVIRONMENT`): with tensor parallelism SGLang 0.5.23
reads CUDA_VISIBLE_DEVICES as numbers of that order, and fails on anything else.
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

_GPU = re.compile(r"^GPU (\d+): .*\(UUID: (\S+)\)", re.MULTILINE)


class GpusTaken(RuntimeError):
    """Other clusters on this machine have the GPUs that are asked for."""


@dataclass(frozen=True)
class Gpu:
    name: str
    """Its number, as nvidia-smi has it."""
    uuid: str


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


def listed(text: str) -> tuple[Gpu, ...]:
    """Those in the output of `nvidia-smi -L`."""
    return tuple(Gpu(number, uuid) for number, uuid in _GPU.findall(text))


def visible(gpus: Sequence[Gpu], cuda_visible_devices: str | None) -> tuple[Gpu, ...]:
    """Those that may be used, in the order in which they are named; without CUDA_VISIBLE_DEVICES all.

    A name is a number of nvidia-smi's, a UUID, or the beginning of one UUID alone. As CUDA does: what stands behind a
    name of nothing, such as -1, does not count.
    """
    if cuda_visible_devices is None:
        return tuple(gpus)
    found: dict[str, Gpu] = {}
    for name in map(str.strip, cuda_visible_devices.split(",")):
        matches = [
            gpu for gpu in gpus if name == gpu.name or (name.startswith("GPU-") and gpu.uuid.startswith(name))
        ]
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
    wanted = options.replicas * each
    needs = f"{_counted(options.replicas, 'replica')} with {_counted(each, 'GPU')} each need {_counted(wanted, 'GPU')}"
    if wanted > len(gpus):
        raise ConfigError(f"{needs}, {len(gpus)} are visible")
    taken: list[Gpu] = []
    for gpu in gpus:
        if len(taken) < wanted and marks.take(gpu.uuid):
            taken.append(gpu)
    if len(taken) < wanted:
        marks.give_back(*(gpu.uuid for gpu in taken))
        raise GpusTaken(
            f"{needs}; of {len(gpus)} that are visible {len(taken)} are free, and clusters on this machine have "
            "the others"
        )
    return tuple(tuple(taken[at : at + each]) for at in range(0, wanted, each))


def environment(gpus: Sequence[Gpu]) -> dict[str, str]:
    """What a replica's environment must say so that it uses these; empty for a replica without GPUs."""
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpu.name for gpu in gpus), **ENVIRONMENT} if gpus else {}


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
