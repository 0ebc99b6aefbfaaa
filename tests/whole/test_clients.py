"""The official `openai` and `anthropic` clients against real replicas on this machine's CPU, through the gateway.

Each API has a tenant of its own. What its clients were told that they used is what the replicas charged it.
"""

import json
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import anthropic
import httpx
import jsonschema
import openai
import pytest

from sglang_fair.tenants import edit
from tests.support.live import Cluster, check_conservation
from tests.support.waiting import wait_until
from tests.whole.conftest import ENVIRONMENT, tenant

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("keyed")]

MODEL = "tiny"
SCHEMA = {
    "type": "object",
    "properties": {"sure": {"type": "boolean"}, "colour": {"enum": ["red", "green"]}},
    "required": ["sure", "colour"],
    "additionalProperties": False,
}
LONG = "This is said again and again, so that a replica has it. " * 4


@dataclass
class Told:
    """What an API has told its clients."""

    prompt: int = 0
    cached: int = 0
    output: int = 0

    def chat(self, usage: Any, choices: int = 1) -> None:
        """SGLang computes the prompt of several choices first, and has it for each of them from the cache."""
        details = usage.prompt_tokens_details
        self.prompt += usage.prompt_tokens * (choices + 1 if choices > 1 else 1)
        self.cached += (details.cached_tokens or 0) if details else 0
        self.output += usage.completion_tokens

    def response(self, usage: Any) -> None:
        self.prompt += usage.input_tokens
        self.cached += usage.input_tokens_details.cached_tokens
        self.output += usage.output_tokens

    def message(self, usage: Any, output: int | None = None) -> None:
        cached = usage.cache_read_input_tokens or 0
        self.prompt += usage.input_tokens + cached
        self.cached += cached
        self.output += usage.output_tokens if output is None else output


@dataclass
class Served:
    """A cluster, with clients for each tenant."""

    cluster: Cluster
    told: defaultdict[str, Told] = field(default_factory=lambda: defaultdict(Told))
    clients: ExitStack = field(default_factory=ExitStack)
    """Closed at the end: a stream that was given up has its connection still."""

    def openai(self, tenant: str) -> openai.OpenAI:
        made = openai.OpenAI(base_url=f"{self.cluster.url}/v1", api_key=tenant, max_retries=0, timeout=120)
        return self.clients.enter_context(made)

    def anthropic(self, tenant: str) -> anthropic.Anthropic:
        made = anthropic.Anthropic(base_url=self.cluster.url, api_key=tenant, max_retries=0, timeout=120)
        return self.clients.enter_context(made)

    def charged(self, tenant: str) -> Told:
        rows = [book["clients"].get(tenant, {}) for book in self.cluster.books()]
        total = {
            name: sum(row.get(name, 0) for row in rows)
            for name in ("extend_tokens", "cached_tokens", "output_tokens")
        }
        return Told(
            total["extend_tokens"] + total["cached_tokens"], total["cached_tokens"], total["output_tokens"]
        )

    def settled(self, tenant: str) -> bool:
        return all(
            row["running"] == row["waiting"] == 0
            for book in self.cluster.books()
            for name, row in book["clients"].items()
            if name == tenant
        )


@pytest.fixture(scope="module")
def served(keyed: Cluster) -> Iterator[Served]:
    made = Served(keyed)
    with made.clients:
        yield made
    check_conservation(*keyed.books())


def holds(served: Served, tenant: str) -> None:
    """The replicas have charged what was told."""
    wait_until(lambda: served.settled(tenant), "nothing runs")
    assert served.charged(tenant) == served.told[tenant]


TOOL = {"name": "paint", "description": "Paints it.", "parameters": SCHEMA, "strict": True}
WHOLE = {"ignore_eos": True}
"""So that an answer has the length that is asked for."""
QUESTION = [{"role": "user", "content": "Which?"}]


def test_chats(served: Served) -> None:
    client, told = served.openai("chat"), served.told["chat"]
    create = client.chat.completions.create
    tools = [{"type": "function", "function": TOOL}]
    for choice in ("required", {"type": "function", "function": {"name": "paint"}}):
        answer = create(model=MODEL, messages=QUESTION, max_tokens=200, tools=tools, tool_choice=choice)
        told.chat(answer.usage)
        [call, *_] = answer.choices[0].message.tool_calls
        assert call.function.name == "paint"
        assert answer.choices[0].finish_reason in ("tool_calls", "length"), (
            "it may call until its tokens are used up"
        )
        jsonschema.validate(json.loads(call.function.arguments), SCHEMA)
        history = [
            *QUESTION,
            answer.choices[0].message.model_dump(exclude_none=True),
            {"role": "tool", "tool_call_id": call.id, "content": "done"},
        ]
        answer = create(model=MODEL, messages=history, max_tokens=3, tools=tools)
        told.chat(answer.usage)
    schema = {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA, "strict": True}}
    answer = create(model=MODEL, messages=QUESTION, max_tokens=100, response_format=schema)
    told.chat(answer.usage)
    jsonschema.validate(json.loads(answer.choices[0].message.content), SCHEMA)
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    stream = create(model=MODEL, messages=QUESTION, max_tokens=9, extra_body=WHOLE, **usage)
    *_, last = stream
    assert last.usage.completion_tokens == 9
    told.chat(last.usage)
    text = create(model=MODEL, messages=QUESTION, max_tokens=20, temperature=0, extra_body=WHOLE)
    told.chat(text.usage)
    stop = next(letter for letter in text.choices[0].message.content if letter.isascii())
    answer = create(model=MODEL, messages=QUESTION, max_tokens=20, temperature=0, stop=[stop])
    told.chat(answer.usage)
    assert answer.choices[0].finish_reason == "stop"
    assert stop not in answer.choices[0].message.content
    holds(served, "chat")


def test_several_choices(served: Served) -> None:
    client, told = served.openai("several"), served.told["several"]
    answer = client.chat.completions.create(
        model=MODEL, messages=QUESTION, max_tokens=12, logprobs=True, top_logprobs=2, n=2, seed=1, extra_body=WHOLE
    )  # fmt: skip
    told.chat(answer.usage, choices=2)
    assert len(answer.choices) == 2
    assert all(len(choice.logprobs.content) == 12 for choice in answer.choices)
    assert all(len(one.top_logprobs) == 2 for choice in answer.choices for one in choice.logprobs.content)
    answer = client.completions.create(
        model=MODEL, prompt=["a", "b"], max_tokens=4, n=2, logprobs=1, seed=3, extra_body=WHOLE
    )
    told.chat(answer.usage, choices=2)
    assert len(answer.choices) == 4
    assert all(len(choice.logprobs.tokens) == 4 for choice in answer.choices)
    wait_until(lambda: served.settled("several"), "nothing runs")
    charged = served.charged("several")
    assert (charged.prompt, charged.output) == (told.prompt, told.output)
    assert charged.cached > 0, "the choices share their prompt"


def test_completions(served: Served) -> None:
    client, told = served.openai("completions"), served.told["completions"]
    stream = client.completions.create(
        model=MODEL, prompt="a", max_tokens=5, stream=True, stream_options={"include_usage": True}
    )
    *_, last = stream
    told.chat(last.usage)
    holds(served, "completions")


def test_responses(served: Served) -> None:
    client, told = served.openai("responses"), served.told["responses"]
    answer = client.responses.create(
        model=MODEL, input="Which?", instructions="Be brief.", max_output_tokens=12,
        include=["message.output_text.logprobs"], top_logprobs=2,
    )  # fmt: skip
    told.response(answer.usage)
    assert answer.id.startswith("resp_")
    assert answer.store is False
    assert answer.usage.output_tokens == len(answer.output[0].content[0].logprobs)
    form = {"format": {"type": "json_schema", "name": "it", "schema": SCHEMA, "strict": True}}
    answer = client.responses.create(model=MODEL, input="Which?", max_output_tokens=100, text=form)
    told.response(answer.usage)
    jsonschema.validate(json.loads(answer.output_text), SCHEMA)
    tools = [{"type": "function", **TOOL}]
    answer = client.responses.create(
        model=MODEL, input="Which?", max_output_tokens=200, tools=tools, tool_choice="required"
    )
    told.response(answer.usage)
    [call] = [item for item in answer.output if item.type == "function_call"][:1]
    jsonschema.validate(json.loads(call.arguments), SCHEMA)
    history = [
        {"role": "user", "content": "Which?"},
        call.model_dump(exclude_none=True),
        {"type": "function_call_output", "call_id": call.call_id, "output": "done"},
    ]
    answer = client.responses.create(model=MODEL, input=history, max_output_tokens=8, tools=tools)
    told.response(answer.usage)
    with client.responses.stream(model=MODEL, input="Which?", max_output_tokens=9) as stream:
        events = list(stream)
    kinds, final = [event.type for event in events], events[-1].response
    assert kinds[0] == "response.created"
    assert kinds[-1] in ("response.completed", "response.incomplete")
    assert "response.output_text.delta" in kinds
    told.response(final.usage)
    holds(served, "responses")


def test_messages(served: Served) -> None:
    client, told = served.anthropic("messages"), served.told["messages"]
    create = client.messages.create
    asked: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "system": "Be brief."}
    answer = create(**asked, max_tokens=7, extra_body={"temperature": 0, "top_p": 0.9})
    told.message(answer.usage)
    assert (answer.type, answer.stop_reason, answer.usage.output_tokens) == ("message", "max_tokens", 7)
    counted = client.messages.count_tokens(**asked).input_tokens
    assert counted == answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0)
    tools = [{"name": "paint", "description": "Paints it.", "input_schema": SCHEMA, "strict": True}]
    answer = create(**asked, max_tokens=200, tools=tools, tool_choice={"type": "any"})
    told.message(answer.usage)
    [call] = [block for block in answer.content if block.type == "tool_use"][:1]
    assert call.name == "paint"
    assert answer.stop_reason in ("tool_use", "max_tokens"), "it may call until its tokens are used up"
    jsonschema.validate(call.input, SCHEMA)
    said = [block.model_dump(exclude_none=True) for block in answer.content]
    uses = [block.id for block in answer.content if block.type == "tool_use"]
    done = [{"type": "tool_result", "tool_use_id": use, "content": "done"} for use in uses]
    turns = [*QUESTION, {"role": "assistant", "content": said}, {"role": "user", "content": done}]
    answer = create(**asked | {"messages": turns}, max_tokens=4, tools=tools)
    told.message(answer.usage)
    with client.messages.stream(**asked, max_tokens=9, extra_body={"temperature": 0}) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == final.content[0].text
    assert final.usage.output_tokens == 9
    told.message(final.usage)
    holds(served, "messages")


def test_errors_of_the_engine_are_those_of_the_clients(served: Served) -> None:
    one, other = served.openai("chat"), served.anthropic("messages")
    with pytest.raises(openai.BadRequestError, match="embedding model") as refused:
        one.embeddings.create(model=MODEL, input="a")
    assert refused.value.type == "invalid_request_error"
    with pytest.raises(openai.BadRequestError, match="temperature") as refused:
        one.responses.create(model=MODEL, input="a", extra_body={"temperature": "hot"})
    assert "File" not in refused.value.message
    for wrong in ({"messages": [{"role": "nobody", "content": "a"}]}, {"max_tokens": 1_000_000}):
        asked: dict[str, Any] = {"model": MODEL, "max_tokens": 3, "messages": QUESTION, **wrong}
        with pytest.raises(anthropic.BadRequestError) as caught:
            other.messages.create(**asked)
        assert caught.value.body["error"]["type"] == "invalid_request_error"
    assert [model.id for model in one.models.list()] == [MODEL]
    assert [(model.id, model.type) for model in other.models.list()] == [(MODEL, "model")]


def test_the_tokenizer_is_not_charged(served: Served) -> None:
    with httpx.Client(base_url=served.cluster.url, headers={"x-api-key": "tokenizer"}, timeout=60) as http:
        ids = http.post(
            "/tokenize", json={"model": MODEL, "prompt": LONG, "add_special_tokens": False}
        ).json()
        text = http.post("/detokenize", json={"model": MODEL, "tokens": ids["tokens"]}).json()["text"]
        assert text == LONG
        chat = {"model": MODEL, "messages": [{"role": "user", "content": LONG}]}
        counted = http.post("/v1/messages/count_tokens", json=chat).json()["input_tokens"]
        assert counted == http.post("/tokenize", json=chat).json()["count"]
        assert http.get("/v1/usage").json()["tokens"] == {"computed": 0, "cached": 0, "output": 0}
    holds(served, "tokenizer")


TOOLS = {
    "/v1/chat/completions": [{"type": "function", "function": TOOL}],
    "/v1/responses": [{"type": "function", **TOOL}],
    "/v1/messages": [{"name": "paint", "input_schema": SCHEMA}],
}


@pytest.mark.parametrize("tools", [False, True])
@pytest.mark.parametrize("path", TOOLS)
def test_the_router_predicts_the_hit(served: Served, path: str, tools: bool) -> None:
    """Of the second of two requests, to the page; the first one's prompt is the whole conversation."""
    turns = [{"role": "user", "content": f"{path} {tools} {LONG}"}]
    body: dict[str, Any] = {"model": MODEL, "input" if path == "/v1/responses" else "messages": turns}
    body |= {"max_output_tokens": 4} if path == "/v1/responses" else {"max_tokens": 4}
    if path == "/v1/messages":
        body["system"] = [{"type": "text", "text": "Be brief."}]
    if tools:
        body["tools"] = TOOLS[path]
    with httpx.Client(base_url=served.cluster.url, headers={"x-api-key": "leaver"}, timeout=60) as http:
        first, second = (http.post(path, json=body) for _ in range(2))
    assert first.status_code == 200, first.text
    usage = second.json()["usage"]
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    cached = usage.get("cache_read_input_tokens", details.get("cached_tokens"))
    assert cached > 200
    assert int(second.headers["x-fair-matched-tokens"]) == cached


# -- a model that makes embeddings


@pytest.fixture(scope="module")
def embedding(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    file = tmp_path_factory.mktemp("tenants") / "tenants.yaml"
    for name in ("embedder", "chat", "messages"):
        edit.add(file, name, tenant(name))
    arguments = ("--tenants", str(file), "--replicas", "1", "--", "--is-embedding")
    with Cluster(*arguments, environment=ENVIRONMENT) as cluster:
        made = Served(cluster)
        with made.clients:
            yield made
        check_conservation(*cluster.books())


def test_embeddings(embedding: Served) -> None:
    """SGLang's own path has the same ones as OpenAI's."""
    client, told = embedding.openai("embedder"), embedding.told["embedder"]
    one = client.embeddings.create(model=MODEL, input="a text", encoding_format="float")
    both = client.embeddings.create(model=MODEL, input=["a text", "another one"])
    ids = client.embeddings.create(model=MODEL, input=[[1, 2, 3], [4, 5]])
    for answer in (one, both, ids):
        told.prompt += answer.usage.prompt_tokens
    with httpx.Client(base_url=embedding.cluster.url, headers={"x-api-key": "embedder"}, timeout=120) as http:
        own = http.post("/encode", json={"text": "a text"}).json()
        rows = http.post("/encode", json={"input_ids": [[1, 2, 3], [4, 5]]}).json()
    told.prompt += sum(row["meta_info"]["prompt_tokens"] for row in (own, *rows))
    assert own["embedding"] == pytest.approx(one.data[0].embedding, abs=0.05)
    assert [len(row["embedding"]) for row in rows] == [len(own["embedding"])] * 2
    assert [len(answer.data) for answer in (one, both, ids)] == [1, 2, 2]
    assert both.data[0].embedding == pytest.approx(one.data[0].embedding, abs=0.05)
    wait_until(lambda: embedding.settled("embedder"), "nothing runs")
    charged = embedding.charged("embedder")
    assert (charged.prompt, charged.output) == (told.prompt, 0)


def test_a_model_that_makes_embeddings_does_not_generate(embedding: Served) -> None:
    client, other = embedding.openai("chat"), embedding.anthropic("messages")
    for ask, more in (
        (client.chat.completions.create, {"messages": QUESTION, "max_tokens": 3}),
        (client.completions.create, {"prompt": "a", "max_tokens": 3}),
        (client.responses.create, {"input": "a"}),
        (other.messages.create, {"messages": QUESTION, "max_tokens": 3}),
    ):
        with pytest.raises((openai.APIError, anthropic.APIError), match="makes embeddings"):
            ask(model=MODEL, **more)
    assert client.embeddings.create(model=MODEL, input="a text").data
    assert other.messages.count_tokens(model=MODEL, messages=QUESTION).input_tokens > 1
