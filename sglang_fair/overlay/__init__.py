"""Fair scheduling inside SGLang, attached through its plugin loader.

`install` is the entry point `sglang.srt.plugins: sglang_fair`. SGLang calls it in each of its processes
before it reads its arguments. SGLang's loader logs a plugin that fails and serves on with stock
scheduling; a server that says DLPM and runs FCFS is worse than none, so a missing target ends the process.
"""

import os
import pkgutil
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

from sglang_fair.overlay import releases, sources


def install() -> None:
    """Register the hooks. SystemExit with one line where SGLang is not what they were written for."""
    if os.environ.get("SGLANG_FAIR_DISABLE") == "1":
        return
    found = releases.found()
    if not releases.is_tested(found):
        _check_untested(found)
    releases.adapt()
    attach("sglang_fair.overlay.hooks", f"cannot attach to sglang {found}")
    from sglang_fair.overlay import wire

    wire.register()


def _check_untested(found: str) -> None:
    """SystemExit unless this version was asked for, and has all that is hooked."""
    asked = os.environ.get(releases.UNSUPPORTED)
    if not asked:
        raise SystemExit(
            f"sglang-fair: sglang {found} is not tested; {', '.join(releases.TESTED)} are. --unsupported-sglang "
            f"({releases.UNSUPPORTED}=1) tries it, SGLANG_FAIR_DISABLE=1 serves without fairness"
        )
    if asked == found:  # another process of this server has looked
        return
    root = sources.installed()
    wrong = ["it has no sources"] if root is None else sources.faults(root, found)
    if wrong:
        more = f", and {len(wrong) - 1} more (sglang-fair doctor)" if len(wrong) > 1 else ""
        raise SystemExit(f"sglang-fair: sglang {found} does not fit: {wrong[0]}{more}")
    os.environ[releases.UNSUPPORTED] = found
    print(
        f"sglang-fair: sglang {found} is not tested: its functions have the names and parameters that are known, and "
        "nothing else was looked at: order, charges, preemption, KV events and load may be wrong",
        file=sys.stderr,
        flush=True,
    )


class Hook(NamedTuple):
    """`function` is attached to `target`, a dotted name, in the way `kind`, one of SGLang's `HookType`, where SGLang is
    as new as the release `since`."""

    target: str
    function: Callable[..., Any]
    kind: Any
    since: str = releases.TESTED[0]


def attach(module: str, otherwise: str) -> None:
    """Register the `HOOKS` of a module. SystemExit, which SGLang's loader lets through, where SGLang has not all that
    they are for; its text begins with `otherwise`."""
    try:
        from sglang.srt.plugins.hook_registry import HookRegistry

        all_hooks: tuple[Hook, ...] = import_module(module).HOOKS
        hooks = [hook for hook in all_hooks if releases.has(hook.since)]
        for hook in hooks:
            pkgutil.resolve_name(hook.target)
    except (ImportError, AttributeError) as error:
        raise SystemExit(f"sglang-fair: {otherwise}: {error}") from error
    for hook in hooks:
        HookRegistry.register(hook.target, hook.function, hook.kind)
