"""Fair scheduling inside SGLang 0.5.23, attached through its plugin loader.

`install` is the entry point `sglang.srt.plugins: sglang_fair`. SGLang calls it in each of its processes
before it reads its arguments. SGLang's loader logs a plugin that fails and serves on with stock
scheduling; a server that says DLPM and runs FCFS is worse than none, so a missing target ends the process.
"""

import os
import pkgutil
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import version
from typing import Any, NamedTuple

SGLANG_VERSION = "0.5.23"
"""The release whose functions the hooks were read from and tested against."""


def is_supported(found: str) -> bool:
    """Whether SGLang's version `found` is the one; a mark that its builder put behind it, as +cu130, is not read."""
    return found.partition("+")[0] == SGLANG_VERSION


def install() -> None:
    """Register the hooks. SystemExit with one line when SGLang is not what they were written for."""
    if os.environ.get("SGLANG_FAIR_DISABLE") == "1":
        return
    found = version("sglang")
    if not is_supported(found) and os.environ.get("SGLANG_FAIR_ANY_VERSION") != "1":
        raise SystemExit(
            f"sglang-fair: needs sglang {SGLANG_VERSION}, found {found} "
            "(SGLANG_FAIR_ANY_VERSION=1 tries anyway, SGLANG_FAIR_DISABLE=1 serves without it)"
        )
    attach("sglang_fair.overlay.hooks", f"cannot attach to sglang {found}")
    from sglang_fair.overlay import wire

    wire.register()


class Hook(NamedTuple):
    """`function` is attached to `target`, a dotted name, in the way `kind`, one of SGLang's `HookType`."""

    target: str
    function: Callable[..., Any]
    kind: Any


def attach(module: str, otherwise: str) -> None:
    """Register the `HOOKS` of a module. SystemExit, which SGLang's loader lets through, where SGLang has not all that
    they are for; its text begins with `otherwise`."""
    try:
        from sglang.srt.plugins.hook_registry import HookRegistry

        hooks: tuple[Hook, ...] = import_module(module).HOOKS
        for hook in hooks:
            pkgutil.resolve_name(hook.target)
    except (ImportError, AttributeError) as error:
        raise SystemExit(f"sglang-fair: {otherwise}: {error}") from error
    for hook in hooks:
        HookRegistry.register(*hook)
