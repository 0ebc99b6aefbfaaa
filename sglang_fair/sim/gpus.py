"""Published figures of GPUs, from which `cost_model.Roofline` computes times.

Dense bf16 tensor-core FLOP/s (vendors print twice as much "with sparsity"), peak memory bandwidth, and the
memory that the driver reports. Sources: NVIDIA's data sheets of A10G (as sold by AWS in g5; it has about
half of the A10's tensor throughput), A100 80 GB SXM, H100 SXM and H200 SXM; memory as `nvidia-smi` prints it.
"""

from collections.abc import Mapping
from dataclasses import dataclass

_TERA, _GIGA, _MEBI = 10**12, 10**9, 2**20


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU at its published peak; no kernel reaches it."""

    name: str
    bf16_flops: float
    """Floating-point operations a second, dense; a multiplication and its addition are two."""
    bandwidth_bytes_per_s: float
    memory_bytes: int


GPUS: Mapping[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        Gpu("a10g", 70 * _TERA, 600 * _GIGA, 23_028 * _MEBI),
        Gpu("a100-80g", 312 * _TERA, 2_039 * _GIGA, 81_920 * _MEBI),
        Gpu("h100", 989 * _TERA, 3_350 * _GIGA, 81_559 * _MEBI),
        Gpu("h200", 989 * _TERA, 4_800 * _GIGA, 143_771 * _MEBI),
    )
}
