"""`/explain/ID` on a replica: what the scheduler remembers of the requests with this id (`core.record`).

    curl http://127.0.0.1:30000/explain/8f14e45f…?client=acme

Without `client` it tells of all clients' requests. The question travels as one of SGLang's own for the scheduler's
state, which reaches every data-parallel rank; what is asked for is in its id, a field that such questions do not use.
"""

import json
import sys
import time
from typing import Any

from sglang_fair.common.record import MOST_NAME

MARK = "sglang_fair.explain:"
"""Before the JSON in the id of such a question."""

STATE_KEY = "explained"


def question(id: str, client: str | None) -> str:
    """The id of a question for the scheduler's state."""
    return MARK + json.dumps([id[:MOST_NAME], client])


def asked(rid: str | None) -> tuple[str, str | None] | None:
    """The id and the client that are asked for; None if it is another question."""
    if rid is None or not rid.startswith(MARK):
        return None
    id, client = json.loads(rid.removeprefix(MARK))
    return id, client


def add_route(manager: Any) -> None:
    """Add the route to SGLang's HTTP application, which this process has."""
    from fastapi import HTTPException
    from sglang.srt.managers.io_struct import GetInternalStateReq

    async def explain(id: str, client: str | None = None) -> Any:
        manager.auto_create_handle_loop()
        answers = await manager.get_internal_state_communicator(GetInternalStateReq(rid=question(id, client)))
        found = [request for answer in answers for request in answer.internal_state[STATE_KEY]]
        if not found:
            raise HTTPException(404, "no such request is remembered here")
        now_s = time.time()
        for request in found:
            request["came_at_s"] = now_s - request["came_s_ago"]
        return {"requests": found}

    app = sys.modules["sglang.srt.entrypoints.http_server"].app
    app.add_api_route("/explain/{id:path}", explain, methods=["GET"])
