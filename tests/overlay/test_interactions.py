"""Applications and interactions on a real replica: whose call goes first, and how a replica is told to stop."""

import asyncio
import os
import signal
import socket
from typing import Any

import pytest

from tests.support.live import Replica
from tests.support.waiting import wait_until

pytestmark = pytest.mark.engine

HALF_A_REQUEST = b"POST /generate HTTP/1.1\r\nhost: r\r\ncontent-length: 1000\r\n\r\n{"


def says(app: str = "", interaction: str = "", call: int | None = None, **more: str) -> dict[str, str]:
    said = {"app": app, "interaction": interaction, "call": "" if call is None else str(call), **more}
    return {f"x-fair-{key}": value for key, value in said.items() if value}


def finished_in_order(
    replica: Replica, calls: list[tuple[str, str, int | None]], sessions: str = ""
) -> list[int]:
    """The places in `calls` (client, interaction, number by a gateway), each of one of `sessions`, in the order in
    which they were answered, while one request at a time is computed."""

    async def scenario() -> list[Any]:
        blocker = asyncio.create_task(replica.ask("blocker", [9] * 40, 20_000))
        await asyncio.to_thread(
            wait_until, lambda: replica.fair()["totals"]["running"] == 1, "a request that runs"
        )
        asked = []
        for place, (client, interaction, call) in enumerate(calls):
            headers = says("app", interaction, call)
            if sessions:
                headers["session-id"] = sessions[place]
            asked.append(asyncio.create_task(replica.ask(client, [place + 1] * 30, 4, headers=headers)))
            waiting = place + 1
            await asyncio.to_thread(
                wait_until,
                lambda waiting=waiting: replica.fair()["totals"]["waiting"] == waiting,
                "a request that waits",
            )
        blocker.cancel()  # it hangs up: now the others are computed, one by one
        return await asyncio.gather(*asked)

    answers = asyncio.run(scenario())
    return sorted(range(len(calls)), key=lambda place: answers[place].finished_at)


def test_a_call_of_an_interaction_that_has_begun_goes_first() -> None:
    """And the sessions of a client take turns."""
    with Replica("--policy", "wsc-dlpm", "--max-running", "1") as replica:
        assert finished_in_order(replica, [("a", "", None), ("b", "x", 2), ("c", "", None)]) == [1, 0, 2]
        # Without a gateway the replica counts itself: the second call of one interaction.
        assert finished_in_order(replica, [("d", "", None), ("e", "y", None), ("e", "y", None)])[0] == 2
        assert finished_in_order(replica, [("f", "", None)] * 5, "11123") == [0, 3, 4, 1, 2]


def test_a_replica_that_is_told_to_stop_ends_whatever_connections_its_clients_keep() -> None:
    """One has sent half a request."""
    with Replica("--policy", "wsc-dlpm") as replica:
        process = replica.process
        assert process is not None
        with socket.create_connection(("127.0.0.1", replica.port)) as client:
            client.sendall(HALF_A_REQUEST)
            os.kill(process.pid, signal.SIGTERM)
            wait_until(lambda: process.poll() is not None, "its end")
