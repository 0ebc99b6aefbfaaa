"""SGLang on a machine without a GPU: an out-of-tree platform on plain PyTorch.

SGLang's own CPU engine needs a compiled `sgl_kernel` that no package index carries. This platform runs
the native PyTorch path instead: slow, complete, and with the real scheduler, radix cache and HTTP server.
It is selected by `SGLANG_PLATFORM=sglang_fair_cpu` and never by itself.
"""

import os
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
"""What a replica on this platform needs; a later argument of the user's wins."""


KERNELS_KEPT = 256
"""In each of the two caches of compiled matrix products, oneDNN's own and the one that torch keeps before it.

A product of a new shape is compiled, which takes some 0.3 MiB, and with 1,024 kept in both, as they are by default,
a replica grows for hours: each new number of tokens in a batch brings five shapes. 256 hold the shapes of fifty
sizes of batch, decoding's among them, which come back.
"""


def environment() -> dict[str, str]:
    """The variables a replica's processes need before they import SGLang; those of the operator stay.

    One OpenMP thread by default: the allocator's small tensor operations are sixty times slower when two
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
    """SGLang's platform loader calls this; None unless this platform was asked for by name."""
    if os.environ.get("SGLANG_PLATFORM") != PLATFORM:
        return None
    define_torchvision_operators()
    return "sglang_fair.engines.cpu_platform.PlainTorchPlatform"


def define_torchvision_operators() -> None:
    """Let torchvision's CUDA wheel be imported on a CPU build of torch.

    It registers fake kernels for two operators that only its CUDA library defines. Their schemas are
    enough; nothing here calls them. Must run in every process before torchvision is imported.
    """
    import torch

    if torch.version.cuda is not None:
        return  # torchvision's own library loads there
    if _LIBRARIES or hasattr(torch.ops.torchvision, "nms"):
        return
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _LIBRARIES.append(library)


_LIBRARIES: list[Any] = []
"""torch drops an operator when its library is collected, so the process keeps it."""
