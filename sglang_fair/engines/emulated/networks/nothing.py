"""A model without weights. Its forward pass must never be called."""

from collections.abc import Iterable
from typing import Any, NoReturn

from torch import Tensor, nn


class EmulatedForCausalLM(nn.Module):
    """The model that SGLang loads in an emulated replica."""

    def __init__(self, config: Any, quant_config: Any = None, prefix: str = "") -> None:
        """Raises SystemExit when the hooks that replace the forward pass are not in place."""
        # SGLang imports this module among its own, before those that the hooks are on.
        from sglang.srt.plugins.hook_registry import HookRegistry

        from sglang_fair.engines.emulated.hooks import HOOKS

        super().__init__()
        missing = [hook.target for hook in HOOKS if hook.target not in HookRegistry._patched]
        if missing:
            raise SystemExit(f"sglang-fair: SGLang did not apply the hooks on {', '.join(missing)}")
        self.config = config

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Nothing to load."""

    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Never called: the hooks replace its callers."""
        raise RuntimeError("an emulated model has no forward pass")


EntryClass = EmulatedForCausalLM
