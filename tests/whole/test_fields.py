"""No value of any field ends a replica, whether a gateway or it is asked itself, and no other client notices."""

import ast
import importlib.util
import json
import random
import threading
from collections import Counter
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from router.gateway.errors import ApiError
from router.gateway.openapi import describe
from router.gateway.request.call import Names
from router.gateway.request.kinds import PATHS
from router.gateway.request.parse import parse
from sglang_fair.common.fields import PARAMS, ROUTES
from tests.support.apis import BODIES
from tests.support.budget import examples, seeds
from tests.support.live import Cluster

CLASSES: dict[str, tuple[str, str]] = {
    "/v1/chat/completions": ("entrypoints/openai/protocol.py", "ChatCompletionRequest"),
    "/v1/completions": ("entrypoints/openai/protocol.py", "CompletionRequest"),
    "/v1/responses": ("entrypoints/openai/protocol.py", "ResponsesRequest"),
    "/v1/embeddings": ("entrypoints/openai/protocol.py", "EmbeddingRequest"),
    "/v1/messages": ("entrypoints/anthropic/protocol.py", "AnthropicMessagesRequest"),
    "/v1/messages/count_tokens": ("entrypoints/anthropic/protocol.py", "AnthropicCountTokensRequest"),
    "/tokenize": ("entrypoints/openai/protocol.py", "TokenizeRequest"),
    "/detokenize": ("entrypoints/openai/protocol.py", "DetokenizeRequest"),
    "/generate": ("managers/io_struct.py", "GenerateReqInput"),
    "/encode": ("managers/io_struct.py", "EmbeddingReqInput"),
}

KINDS = {path: kind for kind, path in PATHS.items()}

SHORT: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"max_tokens": 2},
    "/v1/completions": {"max_tokens": 2},
    "/generate": {"sampling_params": {"max_new_tokens": 2}},
    "/v1/responses": {"max_output_tokens": 4},
}
"""What keeps the answers of the smallest bodies short."""

ODD: dict[str, str] = {
    "negative": "-1", "zero": "0", "one": "1", "2^31": str(1 << 31), "2^40": str(1 << 40), "10^26": str(10**26),
    "huge": "1e39", "tiny": "1e-46", "half": "0.5", "nan": "NaN", "infinite": "Infinity",
    "true": "true", "false": "false", "text": '"x"', "no text": '""', "long text": json.dumps("ab " * 30_000),
    "empty": "[]", "ones": "[1]", "mixed": '[1, "x", null, [2], {"a": 3}]', "2^40s": f"[{1 << 40}]",
    "many": json.dumps([7] * 100_000), "texts": json.dumps(["ab"] * 3000), "object": "{}",
    "key": '{"a": 1}', "id": f'{{"{1 << 40}": 5, "1": 1e39}}', "typed": '{"type": "json_schema", "pattern": "(a+)+"}',
    "objects": '[{"type": "function", "function": {"name": "f", "parameters": {"a": 1}}}]',
    "deep": "[" * 10_000 + "]" * 10_000, "deep object": '{"a":' * 500 + "1" + "}" * 500,
    "url": '"http://127.0.0.1:1/x"', "bomb": '"(?=.{60})([a-z ]|[a-z ])+[0-9]X"',
    "grammar": '"root ::= root root | \\"a\\""',
}  # fmt: skip
"""In JSON, so that what is no JSON can be among them."""


@dataclass(frozen=True)
class Odd:
    """One body."""

    route: str
    field: str
    odd: str
    body: bytes


def bodies(seed: int, most: int) -> list[Odd]:
    """So many of all, drawn by the seed. Half of them are such as the gateway lets through."""
    every, draw = [one for route in CLASSES for one in _of(route)], random.Random(seed)
    let_through = [one for one in every if _is_taken(one)]
    found = draw.sample(let_through, min(most // 2, len(let_through)))
    return draw.sample(found + draw.sample(every, min(most, len(every)) - len(found)), most)


def _is_taken(odd: Odd) -> bool:
    try:
        parse(KINDS[odd.route], odd.body, Names("default"))
    except ApiError:
        return False
    return True


def _of(route: str) -> Iterator[Odd]:
    base: dict[str, Any] = {**BODIES[route], **SHORT.get(route, {}), "model": "default"}
    documented = describe("1")["paths"][route]["post"]["requestBody"]["content"]["application/json"]["schema"]
    component = describe("1")["components"]["schemas"][documented["$ref"].rpartition("/")[2]]
    names = {*ROUTES[route], *component["properties"], *_fields(*CLASSES[route])} - {"model"}
    for name in sorted(names):
        others = {key: one for key, one in base.items() if key != name}
        for odd, value in ODD.items():
            written = json.dumps(others)[:-1] + f', "{name}": {value}}}'
            yield Odd(route, name, odd, written.encode())
    if route != "/generate":
        return
    for name in sorted({*PARAMS.rows, *_fields("sampling/sampling_params.py", "SamplingParams")}):
        short = "" if name == "max_new_tokens" else '"max_new_tokens": 2, '
        for odd, value in ODD.items():
            written = f'{{"text": "hi", "sampling_params": {{{short}"{name}": {value}}}}}'
            yield Odd(route, f"sampling_params.{name}", odd, written.encode())


def _fields(path: str, name: str) -> Collection[str]:
    """The annotated names of a class of SGLang, and of those that it derives from in the same file."""
    found = importlib.util.find_spec("sglang")
    assert found is not None
    assert found.submodule_search_locations is not None
    tree = ast.parse((Path(found.submodule_search_locations[0]) / "srt" / path).read_text())
    classes = {one.name: one for one in tree.body if isinstance(one, ast.ClassDef)}
    one = classes[name]
    bases = [base.id for base in one.bases if isinstance(base, ast.Name) and base.id in classes]
    own = {
        line.target.id
        for line in one.body
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
    }
    return {each for each in own if not each.startswith("_")}.union(*(_fields(path, base) for base in bases))


pytestmark = pytest.mark.e2e

PATIENCE_S = 30.0
"""An odd body may ask for a long answer: who asked leaves then."""
ASKING = 8
STEADY = {"prompt": "as always", "max_tokens": 3, "temperature": 0}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster() as made:
        yield made


@pytest.mark.parametrize("seed", seeds(1))
@pytest.mark.parametrize("directly", [False, True], ids=["gateway", "replica"])
def test_no_value_of_a_field_ends_a_replica(cluster: Cluster, directly: bool, seed: int) -> None:
    before = {process.pid for process in cluster.processes()}
    over, served = threading.Event(), Counter[int]()
    url = cluster.addresses["replicas"][0] if directly else cluster.url
    with httpx.Client(base_url=cluster.url, headers={"x-fair-client": "steady"}, timeout=120) as steady:

        def goes_on() -> None:
            while not over.is_set():
                answer = steady.post("/v1/completions", json=STEADY)
                served[answer.status_code] += 1

        def ask(odd: Odd) -> tuple[Odd, object]:
            try:
                headers = {"content-type": "application/json", "x-fair-client": "odd"}
                answer = httpx.post(url + odd.route, content=odd.body, headers=headers, timeout=PATIENCE_S)
            except httpx.ReadTimeout:
                return odd, "left"
            return odd, answer.status_code

        with ThreadPoolExecutor(ASKING + 1) as threads:
            going = threads.submit(goes_on)
            try:
                answers = list(threads.map(ask, bodies(seed, examples(1500))))
            finally:
                over.set()
            going.result()
    counts = Counter(status for _, status in answers)
    print(dict(counts), dict(served))
    faults = [
        (odd.route, odd.field, odd.odd, status)
        for odd, status in answers
        if isinstance(status, int) and status >= 500 and status != 503
        if (odd.field, status) != ("ttl_ms", 504)  # it had expired
    ]
    assert {process.pid for process in cluster.processes()} == before
    assert set(served) == {200}
    assert directly or not faults, faults
