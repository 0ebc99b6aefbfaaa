"""Real replicas that load several models in turn: each answers as one that serves its model alone, whatever dies."""

import asyncio
import json
import subprocess
import sys
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
from tests.support.live import Cluster, command_line
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

SMALL = ("--", "--max-running-requests", "8", "--max-total-tokens", "4096")
CLASSES = json.dumps({"interactive": 600.0, "batch": 3600.0})
PROMPTS = [[7 * at % 250 for at in range(first, first + 40)] for first in (0, 11, 300)]
TOKENS, LONG = 12, 400
NEARLY = 0.5
"""Of a logarithm of a probability."""
MODELS = "ab"
DEALT = {"r0": "a", "r1": "b", "r2": "a"}

Answers = dict[str, list[list[int]]]
"""What each model says to each prompt, and last at length to the first one."""


def body_of(prompt: list[int], model: str = "", tokens: int = TOKENS, **more: Any) -> dict[str, Any]:
    sampling = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
    return {"input_ids": prompt, "sampling_params": sampling} | ({"model": model} if model else {}) | more


def said(url: str, body: dict[str, Any], **headers: str) -> tuple[int, list[int]]:
    """Status and output tokens."""
    answer = httpx.post(f"{url}/generate", json=body, headers={"x-fair-client": "c", **headers}, timeout=120)
    return answer.status_code, answer.json()["output_ids"] if answer.status_code == 200 else []


def command(*words: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "sglang_fair.cli", *words]
    return subprocess.run(line, capture_output=True, text=True, check=False, timeout=240)


def workers(made: Cluster, *words: str) -> subprocess.CompletedProcess[str]:
    return command("workers", *words, "--cluster", made.url)


def asked(made: Cluster, request: dict[str, Any]) -> dict[str, Any]:
    """What the same commands ask for, without a process for each."""
    port = urlsplit(made.url).port
    assert port is not None
    return control.ask(control.socket_path(port), request, lambda text: None, 240.0)


def swap(made: Cluster, model: str, worker: str = "r1") -> None:
    assert asked(made, {"do": "swap", "name": worker, "model": model}) == {"name": worker, "model": model}


def order(made: Cluster, model: str, worker: str = "r1") -> None:
    answer = httpx.post(f"{made.url}/swap", json={"worker": worker, "model": model}, timeout=120)
    assert answer.status_code == 202, answer.text


def state(made: Cluster, worker: str = "r1") -> dict[str, Any]:
    found: dict[str, Any] = made.status()["swaps"][worker]
    return found


def settled(made: Cluster, worker: str = "r1") -> str:
    """The model that a worker serves, once it does."""

    def is_settled() -> bool:
        status = made.status()
        of = status.get("swaps", {}).get(worker, {})
        row = status.get("workers", {}).get(worker, {})
        return of.get("phase") == "serves" and row.get("state") == "up" and row["model"] == of["model"]

    wait_until(is_settled, "a replica that serves", 120.0)
    return str(state(made, worker)["model"])


def agents(made: Cluster) -> dict[str, int]:
    """The process of the agent beside each replica."""
    below = psutil.Process(made.addresses["pids"]["cluster"]).children(recursive=True)
    lines = {one.pid: command_line(one).split() for one in below}
    return {
        line[line.index("--worker") + 1].partition(",")[0]: pid
        for pid, line in lines.items()
        if "sglang_fair.agent" in line
    }


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: checkpoints.write(root / name, seed) for seed, name in enumerate(MODELS, 1)}


@pytest.fixture(scope="module")
def begun(folders: dict[str, Path]) -> Iterator[tuple[Cluster, Answers]]:
    """With what its replicas say before any of them has loaded anything else."""
    named = f"a={folders['a']}:2,b={folders['b']}:1"
    options = ("--placement", "d2lpm-queue", "--swap", "all", "--swap-finish", "0", "--slo-classes", CLASSES)
    with Cluster("--models", named, *options, *SMALL) as made:
        alone = {}
        for name, at in (("a", 0), ("b", 1)):
            url = made.addresses["replicas"][at]
            alone[name] = [said(url, body_of(prompt))[1] for prompt in PROMPTS]
            alone[name].append(said(url, body_of(PROMPTS[0], tokens=LONG))[1])
        assert alone["a"] != alone["b"]
        yield made, alone


@pytest.fixture
def made(begun: tuple[Cluster, Answers]) -> Cluster:
    """Each replica has the model that it began with."""
    cluster, _ = begun
    for worker, model in DEALT.items():
        if settled(cluster, worker) != model:
            swap(cluster, model, worker)
    return cluster


@pytest.fixture
def alone(begun: tuple[Cluster, Answers]) -> Answers:
    return begun[1]


def check(made: Cluster, model: str, alone: Answers) -> None:
    """Each prompt is answered by this model."""
    for number, prompt in enumerate(PROMPTS):
        assert said(made.url, body_of(prompt, model)) == (200, alone[model][number])


def test_there_and_back(made: Cluster, alone: Answers) -> None:
    replica = made.addresses["replicas"][1]
    swaps = state(made)["swaps"]
    for model in "bab":
        if model != state(made)["model"]:
            done = workers(made, "swap", "r1", model)
            assert (done.returncode, done.stdout) == (0, f"r1 has {model}\n"), done.stderr
        other = "ba"["ab".index(model)]
        assert said(replica, body_of(PROMPTS[0]), **{"x-fair-model": other})[0] == 421
        assert said(replica, body_of(PROMPTS[0]), **{"x-fair-model": model})[1] == alone[model][0]
        listed = httpx.get(f"{replica}/v1/models", timeout=120).json()["data"]
        assert [one["id"] for one in listed] == [model]
        check(made, "a", alone)
        if model == "b":
            check(made, "b", alone)
        else:
            assert said(made.url, body_of(PROMPTS[0], "b"))[0] == 503, "nobody has it"
    assert (state(made)["swaps"] - swaps, state(made)["failed"]) == (2, 0)
    wrong = workers(made, "swap", "r1", "c")
    refusal = "sglang-fair: worker r1 cannot load 'c'; it can load b, a\n"
    assert (wrong.returncode, wrong.stderr) == (1, refusal)
    for asked_for, status in (({"worker": "r9", "model": "b"}, 409), ({"worker": "r0"}, 400)):
        assert httpx.post(f"{made.url}/swap", json=asked_for, timeout=120).status_code == status


def test_weights_that_cannot_be_loaded_leave_the_old_model(
    made: Cluster, alone: Answers, folders: dict[str, Path]
) -> None:
    weights = folders["a"] / "model.safetensors"
    whole, failed = weights.read_bytes(), state(made)["failed"]
    try:
        weights.write_bytes(whole[:-1000])
        done = workers(made, "swap", "r1", "a")
        assert done.returncode == 1
        assert "r1 still has b" in done.stderr
        assert "is damaged" in done.stderr
        check(made, "b", alone)
        weights.unlink()
        assert "has no weights" in workers(made, "swap", "r1", "a").stderr
        check(made, "b", alone)
    finally:
        weights.write_bytes(whole)
    assert state(made)["failed"] == failed + 2
    swap(made, "a")
    check(made, "a", alone)


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


def test_a_stream_that_is_cut_goes_on_elsewhere(made: Cluster, alone: Answers) -> None:
    async def main() -> None:
        seen: list[list[int]] = [[] for _ in range(6)]
        streams = [asyncio.create_task(stream(made, "a", one)) for one in seen]
        while not all(len(one) >= 5 for one in seen):
            await asyncio.sleep(0.01)
        busy = max(("r0", "r2"), key=lambda name: made.status()["workers"][name]["in_flight"])
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


def test_a_replica_comes_and_goes_with_its_agent(made: Cluster, alone: Answers) -> None:
    assert agents(made).keys() == DEALT.keys()
    asked(made, {"do": "drain", "name": "r2"})
    assert agents(made).keys() == {"r0", "r1"}
    refused = workers(made, "add", "--model", "c")
    assert refused.returncode == 1
    assert "there is no model 'c' here; there are a, b" in refused.stderr
    row = asked(made, {"do": "add", "model": "b"})
    assert (row["name"], agents(made).keys()) == ("r2", DEALT.keys())
    assert settled(made, "r2") == "b"
    check(made, "b", alone)
    swap(made, "a", "r2")
    check(made, "a", alone)


def test_two_models_on_one_replica_are_served_in_turn(folders: dict[str, Path], alone: Answers) -> None:
    """Placement qlm has the replica load what its queue needs; each request meets its deadline, of ten minutes."""
    named = ",".join(f"{name}={folder}" for name, folder in folders.items())
    options = ("--swap", "all", "--replicas", "1", "--placement", "qlm", "--slo-classes", CLASSES)
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

                await asyncio.gather(*(ask(number) for number in range(40)))

        asyncio.run(main())
        status = made.status()
        assert status["swaps"]["r0"]["swaps"] >= 1
        assert status["swaps"]["r0"]["failed"] == 0
        assert status["gateway"]["classes"]["interactive"]["missed"] == 0
        assert status["gateway"]["failed"] == 0
