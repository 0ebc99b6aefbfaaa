"""A model without a weight, whose forward pass must never be called."""

from collections.abc import Iterable
from typing import Any, NoReturn

from torch import Tensor, nn


class EmulatedForCausalLM(nn.Module):
    """What SGLang loads in an emulated replica."""

    def __init__(self, config: Any, quant_config: Any = None, prefix: str = "") -> None:
        """SystemExit when the hooks that stand in for the forward pass are not in place."""
        # SGLang imports this module among its own, before those that the hooks are on.
        from sglang.srt.plugins.hook_registry import HookRegistry

        from sglang_fair.engines.emulated.hooks import HOOKS

        super().__init__()
        missing = [hook.target for hook in HOOKS if hook.target not in HookRegistry._patched]
        if missing:
            raise SystemExit(f"sglang-fair: SGLang did not apply the hooks on {', '.join(missing)}")
        self.config = config

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """There are none."""

    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises: the hooks replace whoever would call it."""
        raise RuntimeError("an emulated model has no forward pass")


EntryClass = EmulatedForCausalLM
