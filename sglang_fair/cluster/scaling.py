"""Starts replicas while the router says that deadlines cannot be met without (`scale` decides)."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from sglang_fair.cluster.control import Refused, Say
from sglang_fair.cluster.scale import ScaleUp

LOOK_S = 1.0

Queues = Callable[[], Awaitable[dict[str, Any] | None]]
"""The router's, as `/status` has them."""

Add = Callable[[Say, str | None], Awaitable[Any]]
"""As `Workers.add`."""


async def scale_up(rule: ScaleUp, queues: Queues, add: Add, say: Say) -> None:
    """Looks every `LOOK_S` seconds, until it is cancelled."""
    clock = asyncio.get_running_loop().time
    while True:
        found = (await queues() or {}).get("shortage")
        shortage = found if isinstance(found, dict) else {}
        model = rule.look(shortage, clock())
        if model is not None:
            which = f" of {model}" if model else ""
            more = shortage.get("more") or f"at least {shortage.get('least')}"
            say(
                f"scale-up {rule.added + 1} of {rule.most}: one more replica{which} is started, because deadlines "
                f"cannot be met ({more} more would do: {shortage.get('why', '')})"
            )
            try:
                row = await add(say, model or None)
            except Refused as error:
                rule.failed(clock())
                say(f"scale-up: none could be started; tried again in {rule.retry_s:.0f} s: {error}")
            else:
                rule.started(clock())
                say(f"scale-up: {row.name} serves; {rule.most - rule.added} more may be started")
        await asyncio.sleep(LOOK_S)
