"""`sglang-fair agent`: has one replica load the models that the router names."""

import asyncio
import contextlib
import signal
import sys
from functools import partial
from pathlib import Path

from sglang_fair.agent.agent import Agent
from sglang_fair.common.pairs import split_pairs
from sglang_fair.common.processes import begin
from sglang_fair.settings import protection
from sglang_fair.settings.commands import Mistake
from sglang_fair.settings.program import run_program
from sglang_fair.settings.setting import SettingError
from sglang_fair.settings.table import AgentSettings


def folders(settings: AgentSettings) -> dict[str, Path]:
    """The models' folders by name. Raises SettingError."""
    try:
        pairs = split_pairs(settings.models, "model")
    except ValueError as error:
        raise SettingError(f"--models: {error}", "models") from None
    if not pairs:
        raise SettingError("--models: no model is named", "models")
    return {name: Path(folder).expanduser() for name, folder in pairs}


def check(settings: AgentSettings) -> None:
    """Raises SettingError for settings that cannot be served with."""
    folders(settings)
    if not settings.replica.startswith(("http://", "https://")):
        raise SettingError(f"--replica: {settings.replica!r:.100} is no URL", "replica")
    protection.read_keys(settings.keys, "gateway")
    protection.check(settings)


def serve(settings: AgentSettings) -> int:
    """Serves until SIGTERM or SIGINT; the exit code."""
    begin("info", outlives_parent=settings.outlive_parent)
    try:
        agent = Agent(settings, folders(settings))
    except (ValueError, OSError) as error:
        raise Mistake(str(error)) from None
    with contextlib.suppress(asyncio.CancelledError):
        asyncio.run(_until_told(agent))
    return 0


async def _until_told(agent: Agent) -> None:
    running = asyncio.ensure_future(agent.run())
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, running.cancel)
    await running


main = partial(run_program, "agent", serve, check=check)
"""The command; it takes a command line and returns the exit code."""

if __name__ == "__main__":
    sys.exit(main())
