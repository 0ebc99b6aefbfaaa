"""Applications and interactions on a real replica: normalised charges, whose call goes first, what a file keeps."""

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.live import Cluster, Replica
from tests.support.waiting import wait_until

pytestmark = pytest.mark.engine


def says(app: str = "", interaction: str = "", call: int | None = None, **more: str) -> dict[str, str]:
    said = {"app": app, "interaction": interaction, "call": "" if call is None else str(call), **more}
    return {f"x-fair-{key}": value for key, value in said.items() if value}


def test_an_average_call_counts_one_whatever_the_application() -> None:
    """Two applications of which one's calls cost ten times the other's. So much credit that none is ever refilled."""
    with Replica("--policy", "wsc-dlpm", "--quantum", "1000") as replica:

        async def scenario(numbers: range) -> None:
            for number in numbers:
                for app, tokens, output in (("short", 10, 2), ("long", 100, 20)):
                    await replica.ask(app, [number] * tokens, output, headers=says(app))

        asyncio.run(scenario(range(1, 31)))
        before = replica.fair()["clients"]
        asyncio.run(scenario(range(31, 61)))
        after = replica.fair()["clients"]
        used = {app: before[app]["counter"] - after[app]["counter"] for app in ("short", "long")}
        cost = {app: after[app]["service"] - before[app]["service"] for app in ("short", "long")}
        assert cost["long"] > 5 * cost["short"], "the books are in plain units"
        assert used["short"] == pytest.approx(30, rel=0.1)
        assert used["long"] == pytest.approx(30, rel=0.1)


def finished_in_order(replica: Replica, calls: list[tuple[str, str, int | None]]) -> list[int]:
    """The places in `calls` (client, interaction, number by a gateway) in the order in which they were answered, while
    one request at a time is computed."""

    async def scenario() -> list[Any]:
        blocker = asyncio.create_task(replica.ask("blocker", [9] * 40, 20_000))
        await asyncio.to_thread(
            wait_until, lambda: replica.fair()["totals"]["running"] == 1, "a request that runs"
        )
        asked = []
        for place, (client, interaction, call) in enumerate(calls):
            asked.append(
                asyncio.create_task(
                    replica.ask(client, [place + 1] * 30, 4, headers=says("app", interaction, call))
                )
            )
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


@pytest.mark.parametrize("policy", ["wsc", "wsc-dlpm"])
def test_a_call_of_an_interaction_that_has_begun_goes_first(policy: str) -> None:
    with Replica("--policy", policy, "--max-running", "1") as replica:
        assert finished_in_order(replica, [("a", "", None), ("b", "x", 2), ("c", "", None)]) == [1, 0, 2]
        # Without a gateway the replica counts itself: the second call of one interaction.
        assert finished_in_order(replica, [("d", "", None), ("e", "y", None), ("e", "y", None)])[0] == 2


def calls_of(client: str, path: Path) -> int:
    """What the file knows of its calls."""
    if not path.exists():
        return 0
    return sum(calls for name, calls, *_ in json.loads(path.read_text())["all"]["clients"] if name == client)


def test_what_is_normal_outlives_the_replica(tmp_path: Path) -> None:
    path = tmp_path / "normal.json"
    with Replica("--policy", "wsc-dlpm", "--quantum", "1000", "--fair-normal", str(path)) as replica:
        for number in range(9):
            replica.generate("a", [number + 1] * 100, 10, headers=says("app"))
        wait_until(lambda: calls_of("a", path) == 9, "the file")
    with Replica("--policy", "wsc-dlpm", "--quantum", "1000", "--fair-normal", str(path)) as replica:
        replica.generate("b", [200] * 100, 10, headers=says("app"))
        used = 1000 - replica.fair()["clients"]["b"]["counter"]
        assert used == pytest.approx(1, rel=0.1), "not the 120 over 1200 of a replica that knows nothing"


def test_a_replica_that_is_told_to_stop_writes_what_it_has_learnt(tmp_path: Path) -> None:
    """The last call ends right after the file was written, so that its next time has not come yet."""
    path = tmp_path / "normal.json"
    with Replica("--policy", "wsc", "--fair-normal", str(path)) as replica:
        assert replica.process is not None
        replica.generate("a", [1] * 100, 2)
        wait_until(lambda: calls_of("a", path) == 1, "the file of an idle replica")
        replica.generate("a", [2] * 100, 2)
        os.kill(replica.process.pid, signal.SIGTERM)
        wait_until(lambda: replica.process.poll() is not None, "its end")
    assert calls_of("a", path) == 2


def test_system_messages_cost_what_the_policy_says_from_the_gateway_to_the_charge() -> None:
    """By the paper's prices, 1, 2 and 1, each of their tokens counts one more. So much credit that none is refilled."""
    literal = ("--policy", "wsc-dlpm", "--quantum", "1000", "--policy-options", "literal=true")
    with Cluster(*literal, "--replicas", "1") as cluster:

        def used(client: str, role: str, **more: str) -> float:
            """Tokens that two chats of one kind counted. While nothing is known, an average call has 1000 + 100."""
            for number in range(2):
                messages = [
                    {"role": role, "content": f"{number} {client}" + "s" * 192},  # a token is a byte
                    {"role": "user", "content": "hi"},
                ]
                asked = {"model": "default", "messages": messages, "max_tokens": 4, "ignore_eos": True}
                answer = httpx.post(
                    f"{cluster.url}/v1/chat/completions",
                    json=asked,
                    headers={"x-fair-client": client, **more},
                    timeout=60,
                )
                assert answer.status_code == 200
            return 1100 * (1000 - float(cluster.books()[0]["clients"][client]["counter"]))

        plain = used("plain", "user")
        assert used("paper", "system") - plain == pytest.approx(2 * 199, rel=0.15), "but for what was cached"
        lie = {"x-fair-system-tokens": "100000"}
        assert used("liars", "user", **lie) == pytest.approx(plain, rel=0.05)
