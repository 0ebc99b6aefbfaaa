"""Starts replicas while the router says that deadlines cannot be met without (`scale` decides)."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from sglang_fair.cluster.control import Refused, Say
from sglang_fair.cluster.scale import ScaleUp

LOOK_S = 1.0

Shortage = Callable[[], Awaitable[dict[str, Any] | None]]
Add = Callable[[Say, str | None], Awaitable[Any]]
"""As `Workers.add`."""


class Scaling:
    """Looks every `LOOK_S` seconds."""

    def __init__(self, rule: ScaleUp, shortage: Shortage, add: Add, say: Say) -> None:
        self._rule = rule
        self._shortage = shortage
        self._add = add
        self._say = say

    async def run(self) -> None:
        """Goes on until it is cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            shortage = await self._shortage()
            model = self._rule.look(shortage, loop.time())
            if model is not None:
                await self._start(model, shortage or {})
            await asyncio.sleep(LOOK_S)

    async def _start(self, model: str, shortage: dict[str, Any]) -> None:
        rule, loop = self._rule, asyncio.get_running_loop()
        which = f" of {model}" if model else ""
        self._say(
            f"scale-up {rule.added + 1} of {rule.most}: one more replica{which} is started, because deadlines cannot "
            f"be met ({shortage.get('more') or 'at least ' + str(shortage.get('least'))} more would do: "
            f"{shortage.get('why', '')})"
        )
        try:
            row = await self._add(self._say, model or None)
        except Refused as error:
            rule.failed(loop.time())
            self._say(f"scale-up: none could be started; tried again in {rule.retry_s:.0f} s: {error}")
            return
        rule.started(loop.time())
        self._say(f"scale-up: {row.name} serves; {rule.most - rule.added} more may be started")
