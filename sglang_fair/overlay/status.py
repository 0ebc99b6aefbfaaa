"""`GET /fair` on a replica: the active policy, each client's counter and service, read from the scheduler."""

import sys
from typing import Any


def add_route(manager: Any) -> None:
    """Add the route to SGLang's HTTP application, if this process serves HTTP.

    The tokenizer manager lives in the process that serves; an in-process `Engine` has no application.
    """
    server = sys.modules.get("sglang.srt.entrypoints.http_server")
    if server is None or any(getattr(route, "path", None) == "/fair" for route in server.app.routes):
        return

    async def fair() -> Any:
        states = await manager.get_internal_state()
        reports = [state["fair"] for state in states]
        return reports[0] if len(reports) == 1 else {"data_parallel": reports}

    server.app.add_api_route("/fair", fair, methods=["GET"])
