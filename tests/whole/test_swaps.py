"""Real replicas that load several models in turn: each answers as one that serves its model alone, whatever dies."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import httpx
import psutil
import pytest

from sglang_fair.cluster import control
from tests.support import checkpoints
from tests.support.live import Cluster, Replica, command_line, lives
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

SMALL = ("--", "--max-running-requests", "8", "--max-total-tokens", "4096")
PROMPTS = [[7 * at % 250 for at in range(first, first + 40)] for first in (0, 11, 300)]
TOKENS, LONG = 12, 400
NEARLY = 0.5
"""Of a logarithm of a probability."""
MODELS = "ab"


def body_of(prompt: list[int], model: str = "", tokens: int = TOKENS, **more: Any) -> dict[str, Any]:
    sampling = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
    return {"input_ids": prompt, "sampling_params": sampling} | ({"model": model} if model else {}) | more


def said(url: str, body: dict[str, Any], **headers: str) -> tuple[int, list[int]]:
    """Status and output tokens."""
    answer = httpx.post(f"{url}/generate", json=body, headers={"x-fair-client": "c", **headers}, timeout=120)
    return answer.status_code, answer.json()["output_ids"] if answer.status_code == 200 else []


def workers(made: Cluster, *words: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "sglang_fair.cli", "workers", *words, "--cluster", made.url]
    return subprocess.run(line, capture_output=True, text=True, check=False, timeout=240)


def asked(made: Cluster, request: dict[str, Any]) -> dict[str, Any]:
    """What the same commands ask for, without a process for each."""
    port = urlsplit(made.url).port
    assert port is not None
    return control.ask(control.socket_path(port), request, lambda text: None, 240.0)


def swap(made: Cluster, model: str, worker: str = "r0") -> None:
    assert asked(made, {"do": "swap", "name": worker, "model": model}) == {"name": worker, "model": model}


def order(made: Cluster, model: str, worker: str = "r0") -> None:
    answer = httpx.post(f"{made.url}/swap", json={"worker": worker, "model": model}, timeout=120)
    assert answer.status_code == 202, answer.text


def state(made: Cluster, worker: str = "r0") -> dict[str, Any]:
    found: dict[str, Any] = made.status()["swaps"][worker]
    return found


def settled(made: Cluster, worker: str = "r0") -> str:
    """The model that a worker serves, once it does."""

    def is_settled() -> bool:
        status = made.status()
        of = status["swaps"].get(worker, {})
        row = status["workers"].get(worker, {})
        return of.get("phase") == "serves" and row.get("state") == "up" and row["model"] == of["model"]

    wait_until(is_settled, "a replica that serves", 120.0)
    return str(state(made, worker)["model"])


def pid_of(made: Cluster, name: str) -> int:
    """Of the replica r0, or of its agent a0, that runs by now."""
    if name == "r0":
        return int(next(row["pid"] for row in asked(made, {"do": "list"})["workers"] if row["name"] == "r0"))
    for process in psutil.Process(made.addresses["pids"]["cluster"]).children(recursive=True):
        if "sglang_fair.agent" in command_line(process):
            return process.pid
    raise AssertionError("no agent runs")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: checkpoints.write(root / name, seed) for seed, name in enumerate(MODELS, 1)}


@pytest.fixture(scope="module")
def alone(folders: dict[str, Path]) -> dict[str, list[list[int]]]:
    """What a server of each model alone says to each prompt, and last at length to the first one."""
    found = {}
    for name, folder in folders.items():
        with Replica("--model", str(folder), "--served-name", name, *SMALL) as replica:
            found[name] = [said(replica.url, body_of(prompt))[1] for prompt in PROMPTS]
            found[name].append(said(replica.url, body_of(PROMPTS[0], tokens=LONG))[1])
    assert found["a"] != found["b"]
    return found


@pytest.fixture
def made(folders: dict[str, Path]) -> Iterator[Cluster]:
    named = ",".join(f"{name}={folder}" for name, folder in folders.items())
    with Cluster(
        "--models", named, "--swap", "all", "--replicas", "1", "--swap-finish", "0", *SMALL
    ) as cluster:
        yield cluster


def check(made: Cluster, model: str, alone: dict[str, list[list[int]]]) -> None:
    """Each prompt is answered by this model."""
    for number, prompt in enumerate(PROMPTS):
        assert said(made.url, body_of(prompt, model)) == (200, alone[model][number])


def test_there_and_back_and_there_again(made: Cluster, alone: dict[str, list[list[int]]]) -> None:
    replica = made.addresses["replicas"][0]
    for model in "abab":
        if model != state(made)["model"]:
            done = workers(made, "swap", "r0", model)
            assert (done.returncode, done.stdout) == (0, f"r0 has {model}\n"), done.stderr
        check(made, model, alone)
        other = "ba"["ab".index(model)]
        assert said(made.url, body_of(PROMPTS[0], other))[0] == 503
        assert said(replica, body_of(PROMPTS[0]), **{"x-fair-model": other})[0] == 421
        assert said(replica, body_of(PROMPTS[0]), **{"x-fair-model": model})[1] == alone[model][0]
        chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "model": model}
        answer = httpx.post(f"{made.url}/v1/chat/completions", json=chat, timeout=120)
        assert (answer.status_code, answer.json()["model"]) == (200, model)
        listed = httpx.get(f"{replica}/v1/models", timeout=120).json()["data"]
        assert [one["id"] for one in listed] == [model]
    assert (state(made)["swaps"], state(made)["failed"]) == (3, 0)
    wrong = workers(made, "swap", "r0", "c")
    assert (wrong.returncode, wrong.stderr) == (
        1,
        "sglang-fair: worker r0 cannot load 'c'; it can load a, b\n",
    )
    for asked_for, status in (({"worker": "r9", "model": "b"}, 409), ({"worker": "r0"}, 400)):
        assert httpx.post(f"{made.url}/swap", json=asked_for, timeout=120).status_code == status


def test_weights_that_cannot_be_loaded_leave_the_old_model(
    made: Cluster, alone: dict[str, list[list[int]]], folders: dict[str, Path]
) -> None:
    weights = folders["b"] / "model.safetensors"
    whole = weights.read_bytes()
    try:
        weights.write_bytes(whole[:-1000])
        done = workers(made, "swap", "r0", "b")
        assert done.returncode == 1
        assert "r0 still has a" in done.stderr
        assert "is damaged" in done.stderr
        check(made, "a", alone)
        weights.unlink()
        assert "has no weights" in workers(made, "swap", "r0", "b").stderr
        check(made, "a", alone)
    finally:
        weights.write_bytes(whole)
    assert state(made)["failed"] == 2
    swap(made, "b")
    check(made, "b", alone)


def is_said_by(made: Cluster, model: str, output: list[int]) -> bool:
    """Whether `model` finds each token of an answer to the first prompt the likeliest, or nearly so. A token computed
    in another batch, or as part of a prompt, may win where two are as likely; one of another model is unlikely."""
    assert len(output) == LONG
    asked_for = body_of(
        PROMPTS[0] + output, model, 1, return_logprob=True, logprob_start_len=0, top_logprobs_num=1
    )
    answer = httpx.post(f"{made.url}/generate", json=asked_for, timeout=120)
    assert answer.status_code == 200, answer.text
    meta, start = answer.json()["meta_info"], len(PROMPTS[0])
    chosen = [row[0] for row in meta["input_token_logprobs"][start:]]
    best = [rows[0][0] for rows in meta["input_top_logprobs"][start:]]
    assert len(chosen) == len(best) == LONG
    return all(one >= top - NEARLY for one, top in zip(chosen, best, strict=True))


async def stream(made: Cluster, model: str, seen: list[int], tokens: int = LONG) -> str:
    """Reads one stream into `seen`; the error that it ends with."""
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{made.url}/generate", json=body_of(PROMPTS[0], model, tokens, stream=True)) as response,
    ):
        if response.status != 200:
            return await response.text()
        async for line in response.content:
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                if "error" in event:
                    return str(event)
                seen[:] = event["output_ids"]
    return ""


def test_a_stream_that_is_cut_goes_on_elsewhere(
    folders: dict[str, Path], alone: dict[str, list[list[int]]]
) -> None:
    named = f"a={folders['a']}:2,b={folders['b']}:1"
    with Cluster("--models", named, "--swap", "all", "--swap-finish", "0", *SMALL) as made:
        began = {f"r{number}": settled(made, f"r{number}") for number in range(3)}
        assert sorted(began.values()) == ["a", "a", "b"]

        async def main() -> None:
            seen: list[list[int]] = [[] for _ in range(6)]
            streams = [asyncio.create_task(stream(made, "a", one)) for one in seen]
            while not all(len(one) >= 5 for one in seen):
                await asyncio.sleep(0.01)
            of_a = [name for name, model in began.items() if model == "a"]
            busy = max(of_a, key=lambda name: made.status()["workers"][name]["in_flight"])
            await asyncio.to_thread(order, made, "b", busy)
            assert await asyncio.gather(*streams) == [""] * len(streams)
            assert all(is_said_by(made, "a", one) for one in seen)
            assert await asyncio.to_thread(settled, made, busy) == "b"
            if not made.status()["gateway"]["cut"]:  # all had ended there when the order came
                await asyncio.to_thread(swap, made, "a", busy)

        for _ in range(5):
            asyncio.run(main())
            if made.status()["gateway"]["cut"]:
                break
        assert made.status()["gateway"]["cut"] > 0
        check(made, "b", alone)
        check(made, "a", alone)
        assert is_said_by(made, "b", alone["b"][3])
        assert not is_said_by(made, "b", alone["a"][3])
        comes_and_goes(made, alone)


def comes_and_goes(made: Cluster, alone: dict[str, list[list[int]]]) -> None:
    """A replica that is added has an agent of its own; one that is drained takes its agent along."""

    def agents() -> int:
        root = psutil.Process(made.addresses["pids"]["cluster"])
        return sum("sglang_fair.agent" in command_line(one) for one in root.children(recursive=True))

    assert agents() == 3
    asked(made, {"do": "drain", "name": "r2"})
    assert agents() == 2
    row = asked(made, {"do": "add", "model": "b"})
    assert (row["name"], agents()) == ("r2", 3)
    assert settled(made, "r2") == "b"
    swap(made, "a", "r2")
    check(made, "a", alone)


def test_a_stream_that_nobody_else_can_go_on_with_finishes(
    made: Cluster, alone: dict[str, list[list[int]]]
) -> None:
    async def main() -> None:
        seen: list[int] = []
        one = asyncio.create_task(stream(made, "a", seen))
        while len(seen) < 5:
            await asyncio.sleep(0.01)
        await asyncio.to_thread(order, made, "b")
        assert await one == ""
        assert seen == alone["a"][3]

    asyncio.run(main())
    wait_until(lambda: settled(made) == "b", "the swap")
    check(made, "b", alone)


MOMENTS_S = (0.0, 0.02, 0.05, 0.12)
"""After the order. Five early deaths in a row, and the supervisor gives a process up."""


@pytest.mark.parametrize("name", ["a0", "r0"])
def test_whoever_is_killed_during_a_swap(name: str, made: Cluster, alone: dict[str, list[list[int]]]) -> None:
    """After an agent's death the replica has one model or the other, after a replica's the one that it began with. No
    answer is another model's."""
    for moment_s in MOMENTS_S:
        before = settled(made)
        target = "ba"["ab".index(before)]
        pid = pid_of(made, name)
        order(made, target)
        time.sleep(moment_s)
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda pid=pid: not lives(pid), "its end")
        for model in MODELS:
            status, tokens = said(made.url, body_of(PROMPTS[0], model))
            assert status in (200, 502, 503)
            assert status != 200 or tokens == alone[model][0]

        def is_back(name: str = name) -> bool:
            answers = [said(made.url, body_of(PROMPTS[1], model)) for model in MODELS]
            for model, (status, tokens) in zip(MODELS, answers, strict=True):
                assert status in (200, 502, 503)
                assert status != 200 or tokens == alone[model][1]
            return any(status == 200 for status, _ in answers)

        wait_until(is_back, "somebody serves", 120.0)
        has = settled(made)
        check(made, has, alone)
        if name == "r0":
            assert has in ("a", target)
        swap(made, "ba"["ab".index(has)])
        check(made, "ba"["ab".index(has)], alone)


def test_two_models_on_one_replica_are_served_in_turn(
    folders: dict[str, Path], alone: dict[str, list[list[int]]]
) -> None:
    """Placement qlm has the replica load what its queue needs; each request meets its deadline, of ten minutes."""
    named = ",".join(f"{name}={folder}" for name, folder in folders.items())
    classes = json.dumps({"interactive": 600.0})
    options = ("--swap", "all", "--replicas", "1", "--placement", "qlm", "--slo-classes", classes)
    with Cluster("--models", named, *options, *SMALL) as made:

        async def main() -> None:
            async with aiohttp.ClientSession() as http:

                async def ask(number: int) -> None:
                    model, prompt = MODELS[number % 2], number % len(PROMPTS)
                    body, headers = body_of(PROMPTS[prompt], model), {"x-fair-client": f"c{number % 5}"}
                    async with http.post(f"{made.url}/generate", json=body, headers=headers) as response:
                        answer = await response.json()
                        assert response.status == 200, answer
                        assert answer["output_ids"] == alone[model][prompt]

                for _ in range(2):
                    await asyncio.gather(*(ask(number) for number in range(40)))
                seen: list[list[int]] = [[], []]
                found = await asyncio.gather(
                    *(stream(made, model, seen[at]) for at, model in enumerate(MODELS))
                )
                assert found == ["", ""]
                for at, model in enumerate(MODELS):
                    assert await asyncio.to_thread(is_said_by, made, model, seen[at])

        asyncio.run(main())
        status = made.status()
        assert status["swaps"]["r0"]["swaps"] >= 2
        assert status["swaps"]["r0"]["failed"] == 0
        assert status["gateway"]["classes"]["interactive"]["missed"] == 0
        assert status["gateway"]["failed"] == 0
