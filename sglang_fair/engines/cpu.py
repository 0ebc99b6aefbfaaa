"""SGLang on a machine without a GPU: an out-of-tree platform on plain PyTorch.

SGLang's own CPU engine needs a compiled `sgl_kernel` that no package index carries. This platform runs the native
PyTorch path instead. It is slow but complete, with the real scheduler, radix cache and HTTP server. It is used where
`SGLANG_PLATFORM=sglang_fair_cpu` asks for it and nowhere else.
"""

import multiprocessing
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

PLATFORM = "sglang_fair_cpu"

SERVER_ARGUMENTS: tuple[str, ...] = (
    "--device", "cpu",
    "--attention-backend", "torch_native",
    "--sampling-backend", "pytorch",
    "--disable-overlap-schedule",
    "--mem-fraction-static", "0.2",
    "--sleep-on-idle",
)  # fmt: skip
"""SGLang's arguments on this platform. A later argument of the user's wins."""

KERNELS_KEPT = 256
"""Entries in each of two caches of compiled matrix products: oneDNN's own, and torch's in front of it.

Each new shape is compiled, at some 0.3 MiB, and each new number of tokens in a batch brings five shapes. With the
default of 1,024 entries a replica's memory grows for hours. 256 entries hold the shapes of fifty batch sizes, among
them those of decoding, which recur.
"""


def environment() -> dict[str, str]:
    """The variables that a replica's processes need before they import SGLang. What the operator has set stays.

    By default there is one OpenMP thread. The allocator's small tensor operations are sixty times slower when the
    threads of two replicas wait for each other on the same cores.
    """
    defaults = {
        "OMP_NUM_THREADS": "1",
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": str(KERNELS_KEPT),
        "LRU_CACHE_CAPACITY": str(KERNELS_KEPT),
    }
    own = {"SGLANG_PLATFORM": PLATFORM, "CUDA_VISIBLE_DEVICES": ""}
    return own | {name: os.environ.get(name, default) for name, default in defaults.items()}


def activate() -> str | None:
    """SGLang's platform loader calls this. Returns the platform's class, None unless it was asked for by name."""
    if os.environ.get("SGLANG_PLATFORM") != PLATFORM:
        return None
    return "sglang_fair.engines.cpu_platform.PlainTorchPlatform"


def define_torchvision_operators() -> None:
    """Makes torchvision's CUDA wheel, the only one that PyPI has, importable beside a CPU build of torch.

    The wheel registers fake kernels for two operators that only its CUDA library defines. Nothing here calls them, so
    their schemas are enough. torch calls this at the end of its import (`torch.backends` in pyproject.toml).
    """
    import torch

    if torch.version.cuda is not None or not _is_cuda_torchvision():
        return  # its own library loads, and defines them
    if _LIBRARIES:
        return
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _LIBRARIES.append(library)


def _is_cuda_torchvision() -> bool:
    """By the version that the build has written down. Nothing is imported."""
    found = find_spec("torchvision")
    if found is None or found.origin is None:
        return False
    try:
        return "+cu" in Path(found.origin).with_name("version.py").read_text(encoding="utf-8")
    except OSError:
        return False


START_METHOD_SET = "sglang.srt.entrypoints.engine._set_envs_and_config"
"""The function of SGLang's after which `fork_subprocesses` is called."""


def fork_subprocesses(*_: Any, **__: Any) -> None:
    """Has SGLang fork its scheduler and its detokenizer, which works without a GPU and spares them all imports."""
    multiprocessing.set_start_method("fork", force=True)


_LIBRARIES: list[Any] = []
"""Keeps the library alive: torch drops its operators when it is collected."""
