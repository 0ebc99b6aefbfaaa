"""The platform class that SGLang instantiates. It is not in `cpu` because importing it imports SGLang."""

from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform


class PlainTorchPlatform(CpuDeviceMixin, SRTPlatform):
    """A CPU without `sgl_kernel`: native PyTorch for attention, sampling and every layer."""

    _enum = PlatformEnum.OOT
    capabilities = PlatformCapabilities()

    def is_pin_memory_available(self, device: object = None) -> bool:
        return False

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def get_dispatch_key_name(self) -> str:
        return "native"
