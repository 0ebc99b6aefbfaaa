"""The platform class that SGLang instantiates. It is not in `cpu` because importing it imports SGLang."""

from typing import Any

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import SRTPlatform

from sglang_fair.overlay import releases


class PlainTorchPlatform(CpuDeviceMixin, SRTPlatform):
    """A CPU without `sgl_kernel`: native PyTorch for attention, sampling and every layer."""

    _enum = PlatformEnum.OOT

    def apply_server_args_defaults(self, server_args: Any) -> None:
        """Computes in float32, unless `--dtype` is given, where the CPU has no vector instructions for bfloat16.

        There oneDNN multiplies bfloat16 one number at a time: nine times slower at 512 tokens on an AMD EPYC with AVX2.
        """
        if server_args.dtype == "auto" and not _multiplies_bfloat16():
            server_args.dtype = "float32"

    def is_pin_memory_available(self, device: object = None) -> bool:
        return False

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def get_dispatch_key_name(self) -> str:
        return "native"


releases.complete_platform(PlainTorchPlatform)


def _multiplies_bfloat16() -> bool:
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
