"""Two models in one cluster of real replicas: each answers as one that serves it alone, and never for the other."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from typing import Any

import aiohttp
import httpx
import pytest

from tests.support.live import Cluster, lives
from tests.support.waiting import eventually, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

SMALL = ("--", "--max-running-requests", "8", "--max-total-tokens", "4096")
PROMPTS = [[7 * at % 250 for at in range(first, first + 40)] for first in (0, 11, 300)]
TOKENS = 12
CLASSES = json.dumps({"interactive": 600.0, "batch": 3600.0})


def body_of(prompt: list[int], model: str | None = None, **more: Any) -> dict[str, Any]:
    sampling = {"max_new_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    return {"input_ids": prompt, "sampling_params": sampling} | ({"model": model} if model else {}) | more


def said(url: str, body: dict[str, Any], **headers: str) -> tuple[int, list[int], str]:
    """Status, output tokens and replica."""
    answer = httpx.post(f"{url}/generate", json=body, headers={"x-fair-client": "c", **headers}, timeout=120)
    tokens = answer.json()["output_ids"] if answer.status_code == 200 else []
    return answer.status_code, tokens, answer.headers.get("x-fair-worker", "")


def command(*words: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "sglang_fair.cli", *words]
    return subprocess.run(line, capture_output=True, text=True, check=False, timeout=240)


def pid_of(cluster: Cluster, name: str) -> int:
    pid: int = cluster.addresses["pids"][name]
    return pid


def test_two_models_on_real_replicas() -> None:
    models = ("--models", "a=tiny,b=bench", "--slo-classes", CLASSES)
    with Cluster(*models, *SMALL) as made:
        replicas: list[str] = made.addresses["replicas"]
        assert made.addresses["models"] == ["a", "b"]
        alone = {
            model: [said(replicas[at], body_of(prompt))[1] for prompt in PROMPTS]
            for at, model in enumerate("ab")
        }
        assert alone["a"] != alone["b"]
        listed = httpx.get(f"{made.url}/v1/models", timeout=120).json()["data"]
        assert [one["id"] for one in listed] == ["a", "b"]
        for _ in range(2):
            for number, prompt in enumerate(PROMPTS):
                for at, model in enumerate("ab"):
                    status, tokens, worker = said(made.url, body_of(prompt, model))
                    assert (status, worker) == (200, f"r{at}")
                    assert tokens == alone[model][number], "token for token as the replica by itself"
        assert said(made.url, body_of(PROMPTS[0]))[1:] == (alone["a"][0], "r0"), "the first one, unasked"
        assert said(made.url, body_of(PROMPTS[0], "c"))[0] == 404
        chats(made)
        asyncio.run(streams(made, alone))
        one_book_for_both(made)
        deadlines(made)
        a_router_that_is_killed(made, alone)
        a_replica_that_is_killed(made, alone)
        one_more(made, alone)


def chats(made: Cluster) -> None:
    """OpenAI's interface, whose answers name the model that was asked for."""
    asked = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, "temperature": 0}
    for at, model in enumerate("ab"):
        answer = httpx.post(f"{made.url}/v1/chat/completions", json=asked | {"model": model}, timeout=120)
        assert (answer.status_code, answer.headers["x-fair-worker"]) == (200, f"r{at}"), answer.text
        assert answer.json()["model"] == model
    refused = httpx.post(f"{made.url}/v1/chat/completions", json=asked | {"model": "c"}, timeout=120)
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")


async def streams(made: Cluster, alone: dict[str, list[list[int]]]) -> None:
    """Many at a time, of both models."""
    async with aiohttp.ClientSession() as http:

        async def ask(number: int) -> None:
            model, prompt = "ab"[number % 2], number % len(PROMPTS)
            body = body_of(PROMPTS[prompt], model, stream=True)
            tokens: list[int] = []
            headers = {"x-fair-client": f"c{number % 3}"}
            async with http.post(f"{made.url}/generate", json=body, headers=headers) as response:
                assert response.headers["x-fair-worker"] == f"r{number % 2}"
                async for line in response.content:
                    if line.startswith(b"data: {"):
                        tokens = json.loads(line[6:])["output_ids"]
            assert tokens == alone[model][prompt]

        await asyncio.gather(*(ask(number) for number in range(24)))


def one_book_for_both(made: Cluster) -> None:
    """A client is one client, whatever models it uses: deficits are its own at each replica."""
    state = made.status()
    assert {name: one["model"] for name, one in state["workers"].items()} == {"r0": "a", "r1": "b"}
    assert state["deficits"]["c"].keys() == {"r0", "r1"}
    assert state["gateway"]["models"].keys() == {"a", "b"}
    found = command("status", made.url)
    assert found.returncode == 0, found.stderr
    assert "model" in found.stdout
    usage = httpx.get(f"{made.url}/v1/usage", headers={"x-fair-client": "c"}, timeout=120).json()
    assert usage["replicas"] == 2


def deadlines(made: Cluster) -> None:
    """What is promised reaches the replica, and what came of it is told."""
    status, _, _ = said(
        made.url, body_of(PROMPTS[0], "b"), **{"x-fair-class": "batch", "x-request-id": "late"}
    )
    assert status == 200
    assert said(made.url, body_of(PROMPTS[0]), **{"x-fair-class": "gold"})[0] == 400
    assert said(made.url, body_of(PROMPTS[0]), **{"x-fair-slo-ms": "0.001"})[0] == 200
    classes = made.status()["gateway"]["classes"]
    assert classes["batch"] == {"requests": 1, "met": 1, "missed": 0}
    assert classes["interactive"]["missed"] == 1
    told = command("explain", "late", "--gateway", made.url)
    assert "class batch: first token within 3,600.00 s: met" in told.stdout, told.stdout


def a_router_that_is_killed(made: Cluster, alone: dict[str, list[list[int]]]) -> None:
    os.kill(pid_of(made, "router"), signal.SIGKILL)
    for number in range(12):  # first the gateway places by itself, then the next router does
        at = number % 2
        status, tokens, worker = said(
            made.url, body_of(PROMPTS[0], "ab"[at]), **{"x-fair-client": f"{number}"}
        )
        assert (status, worker, tokens) == (200, f"r{at}", alone["ab"[at]][0])

    def is_back() -> bool:
        state = made.status()
        models = {name: one.get("model") for name, one in state["workers"].items()}
        return not state["gateway"]["fallback"] and models == {"r0": "a", "r1": "b"}

    wait_until(is_back, "the next router knows who has what")


def a_replica_that_is_killed(made: Cluster, alone: dict[str, list[list[int]]]) -> None:
    """While nobody has a model its requests fail, and nobody else's; then it is back."""

    async def main() -> None:
        async with aiohttp.ClientSession() as http:

            async def ask(model: str) -> tuple[int, str, list[int]]:
                async with http.post(f"{made.url}/generate", json=body_of(PROMPTS[1], model)) as response:
                    answer = await response.json()
                    worker = response.headers.get("x-fair-worker", "")
                    return response.status, worker, answer.get("output_ids", [])

            pid = pid_of(made, "r1")
            os.kill(pid, signal.SIGKILL)
            await eventually(lambda: not lives(pid), "the replica is gone")

            async def is_back() -> bool:
                status, worker, tokens = await ask("a")
                assert (status, worker, tokens) == (200, "r0", alone["a"][1])
                status, worker, tokens = await ask("b")
                assert status in (200, 502, 503), "no other status, and no other model"
                if status == 200:
                    assert (worker, tokens) == ("r1", alone["b"][1])
                return status == 200

            await eventually(is_back, "it is started again, with its model")

    asyncio.run(main())


def one_more(made: Cluster, alone: dict[str, list[list[int]]]) -> None:
    refused = command("workers", "add", "--model", "c", "--cluster", made.url)
    assert refused.returncode == 1
    assert "there is no model 'c' here; there are a, b" in refused.stderr
    added = command("workers", "add", "--model", "b", "--cluster", made.url)
    assert added.returncode == 0, added.stderr
    rows = json.loads(command("workers", "list", "--json", "--cluster", made.url).stdout)
    assert {row["name"]: row["model"] for row in rows} == {"r0": "a", "r1": "b", "r2": "b"}
    workers = set()
    for number in range(40):
        prompt = [(number * 31 + at) % 250 for at in range(30)]
        status, _, worker = said(made.url, body_of(prompt, "b"), **{"x-fair-client": f"n{number}"})
        assert status == 200
        workers.add(worker)
        status, tokens, worker = said(made.url, body_of(PROMPTS[2], "a"))
        assert (status, tokens, worker) == (200, alone["a"][2], "r0")
    assert workers == {"r1", "r2"}
