"""SGLang's own programs against a gateway: its frontend language, and `sglang.bench_serving`."""

import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from sglang_fair.models.catalog import resolve
from tests.support import fork_server
from tests.support.live import Cluster
from tests.support.sgl_programs import JUDGE, TREE
from tests.whole.conftest import ADMIN
from workloads.programs import Call, Execution, Judge, Outcome, Program, Reply, TextCodec, TreeOfThought

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("keyed")]

MODEL, KEY = "tiny", "programs"
Answers = dict[str, tuple[str, int]]


def ran(*arguments: str, **environment: str) -> str:
    done = fork_server.run(*arguments, environment=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def found(keyed: Cluster) -> dict[str, Any]:
    return json.loads(ran("-m", "tests.support.sgl_programs", keyed.url, KEY).splitlines()[-1])


def calls(program: Program, answers: Answers) -> tuple[list[Call], Outcome | None]:
    """All calls of a program that has these answers."""
    execution = Execution(program)
    waiting, made = execution.start(), []
    while waiting:
        number, call = waiting.pop()
        made.append(call)
        text, _ = answers.get(str(call.prompt), ("", 0))
        waiting += execution.reply(number, Reply(text))
    return made, execution.outcome


@pytest.mark.parametrize(
    ("name", "program"),
    [
        ("tree", lambda: TreeOfThought(2, 3, TREE["thought_tokens"]).program(TREE["question"], TextCodec())),
        ("judge", lambda: Judge(3, JUDGE["judgement_tokens"]).program(JUDGE["article"], TextCodec())),
    ],
)
def test_an_example_makes_the_calls_of_its_kind(found: dict[str, Any], name: str, program: Any) -> None:
    had = found[name]
    expected, outcome = calls(program(), had["answers"])
    assert (had["error"], outcome) == (None, Outcome.OK)
    assert {call.prompt: call.max_output_tokens for call in expected} == {
        prompt: limit for prompt, (_, limit) in had["answers"].items()
    }
    prefixes = [one["text"] for one in had["sent"] if one["sampling_params"]["max_new_tokens"] == 0]
    assert len(had["sent"]) == len(expected) + len(prefixes)
    assert all(any(call.prompt.startswith(prefix) for call in expected) for prefix in prefixes)
    if name == "tree":
        assert had["value"] == len(expected)
    else:
        assert had["value"] in had["answers"][max(had["answers"], key=len)]


def test_a_run_is_one_interaction(found: dict[str, Any]) -> None:
    names = [{one["metadata"]["interaction"] for one in found[name]["sent"]} for name in ("tree", "judge")]
    assert [len(one) for one in names] == [1, 1]
    assert not names[0] & names[1]
    assert {one["metadata"]["app"] for one in found["tree"]["sent"]} == {"tree"}
    others = [one["metadata"]["interaction"] for one in found["sent"]]  # two of a batch, and one
    assert len(set(others)) == 3


def test_all_that_the_frontend_knows_is_answered(found: dict[str, Any]) -> None:
    assert found["documented"].rstrip().endswith(("yes", "no"))
    for text in (*found["batch"], found["stream"]):
        assert re.search(r"(yes|no).*\d{2}\d{2}$", text, re.DOTALL), text
    name, info = found["info"]
    assert name == info["served_model_name"] == MODEL


def test_what_replicas_have_cached_is_gone_when_an_operator_says_so(keyed: Cluster) -> None:
    """SGLang's event says so to the router, too."""
    asked = {"prompt": "This is said again, so that a replica has it. " * 3, "max_tokens": 2}
    headers = {"authorization": f"Bearer {KEY}"}

    def matched() -> int:
        answer = httpx.post(f"{keyed.url}/v1/completions", json=asked, headers=headers, timeout=120)
        return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    matched()
    assert matched() > 0
    admin = keyed.addresses["admin"]
    assert httpx.post(f"{admin}/flush_cache?timeout=60", headers=headers, timeout=120).status_code == 401
    operator = {"authorization": f"Bearer {ADMIN}"}
    answer = httpx.post(f"{admin}/flush_cache?timeout=60", headers=operator, timeout=120)
    assert answer.json() == {"workers": ["r0", "r1"]}
    assert matched() == 0


BENCHMARK = """
import sys, types
sys.modules["datasets"] = types.SimpleNamespace(load_dataset=None)  # which it imports for one that is not used here
from sglang.benchmark.serving import cli_main
for backend in ("sglang", "sglang-oai", "sglang-oai-chat"):
    sys.argv[1:] = ["--backend", backend, *GIVEN]
    cli_main()
"""


def test_sglangs_benchmark_runs(keyed: Cluster, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    given = [
        "--base-url", keyed.url, "--served-model-name", MODEL, "--model", str(resolve(MODEL)),
        "--tokenizer", str(resolve(MODEL)), "--dataset-name", "random-ids", "--random-input-len", "32",
        "--random-output-len", "4", "--num-prompts", "4", "--output-file", str(out),
    ]  # fmt: skip
    ran("-c", BENCHMARK.replace("GIVEN", repr(given)), OPENAI_API_KEY=KEY)
    told = [json.loads(line) for line in out.read_text().splitlines()]
    assert [one["completed"] for one in told] == [4, 4, 4]
    assert {one["server_info"]["served_model_name"] for one in told} == {MODEL}
