"""A stream that is cut anywhere and goes on from another engine reads as if it had not been cut."""

import json
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.gateway.answer.resume import Diverged, Resumable
from router.gateway.answer.sse import Stream
from router.gateway.request.call import Call, parse
from router.gateway.request.continuation import continuation
from router.gateway.request.tokens import Tokens
from tests.support.stand_in import Engine, make_tokenizer

KINDS = ("chat", "completions", "generate")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def request(kind: str, text: str, limit: int, stop: list[str] | None = None, **more: Any) -> dict[str, Any]:
    sampling: dict[str, Any] = {"temperature": 0, "stop": stop}
    if kind == "generate":
        return {
            "text": text,
            "stream": True,
            "sampling_params": {"max_new_tokens": limit, **sampling, **more},
        }
    prompt: dict[str, Any] = {"prompt": text}
    if kind == "chat":
        prompt = {"messages": [{"role": "user", "content": text}]}
    return {
        "stream": True,
        "max_tokens": limit,
        "stream_options": {"include_usage": True},
        **prompt,
        **sampling,
        **more,
    }


class Ones(random.Random):
    """Chooses the first: every token its own event."""

    def choice(self, seq: Any) -> Any:
        return seq[0]


class Client:
    """One client's stream, over as many engines as it takes."""

    def __init__(self, tokenizer: Path, kind: str, body: dict[str, Any]) -> None:
        self.call: Call = parse(kind, json.dumps(body).encode(), "tiny")
        self.tokens = Tokens(tokenizer)
        self.resumable = Resumable(self.call)
        self.leg: Call = self.call
        self.got = b""
        self.legs: list[dict[str, Any]] = []

    def read(self, engine: Engine, rng: random.Random, events: int | None) -> None:
        """`events` of the leg's stream, or all, in pieces of any length."""
        self.legs.append(json.loads(self.leg.forwarded(f"{len(self.legs):032x}")))
        sent = list(engine.events(self.call.kind, self.legs[-1], lambda: rng.choice((1, 1, 2, 5))))
        data = b"".join(sent if events is None else sent[:events])
        if events is not None:
            data += sent[events][: rng.randrange(len(sent[events]))] if events < len(sent) else b""
        stream = Stream(self.leg)
        while data:
            size = rng.randrange(1, 400)
            if shown := stream.feed(data[:size]):
                self.got += self.resumable.pass_on(shown)
            data = data[size:]

    def lose(self) -> None:
        prompt = [] if self.call.kind == "chat" else self.tokens.ids(self.call)
        self.leg = self.resumable.next_leg(prompt, self.tokens.text).call

    def reading(self) -> dict[str, Any]:
        """What it makes of its stream."""
        *events, last = self.got.removesuffix(b"\n\n").split(b"\n\n")
        assert last == b"data: [DONE]"
        chunks = [json.loads(event.removeprefix(b"data: ")) for event in events]
        if self.call.kind == "generate":
            texts = [chunk["text"] for chunk in chunks]
            # The last one may be shorter: a stop text takes back what was sent.
            assert all(later.startswith(text) for text, later in pairwise(texts[:-1]))
            return {
                "text": texts[-1],
                "ids": chunks[-1]["output_ids"],
                "meta": chunks[-1]["meta_info"] | {"cached_tokens": 0},
                "ends": sum(chunk["meta_info"]["finish_reason"] is not None for chunk in chunks),
                "names": {chunk["meta_info"]["id"] for chunk in chunks},
            }
        choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
        assert not any("token_ids" in choice or "prompt_token_ids" in choice for choice in choices)
        holders = [choice.get("delta", choice) for choice in choices]
        return {
            "text": "".join(holder.get("text") or holder.get("content") or "" for holder in holders),
            "roles": [holder["role"] for holder in holders if "role" in holder],
            "ends": [choice["finish_reason"] for choice in choices if choice["finish_reason"]],
            "usage": [chunk["usage"] for chunk in chunks if not chunk["choices"]],
            "names": {chunk["id"] for chunk in chunks},
            "times": len({chunk["created"] for chunk in chunks}),
        }


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    limit=st.integers(1, 40),
    stop=st.sampled_from([None, ["a"], ["bc", "é."], ["abcdef", "d"]]),
    cuts=st.lists(st.integers(1, 45), max_size=3),
    seed=st.integers(0, 2**32),
)
def test_wherever_it_is_cut_the_client_reads_the_same(
    tokenizer: Path, kind: str, limit: int, stop: list[str] | None, cuts: list[int], seed: int
) -> None:
    rng = random.Random(seed)
    engine = Engine(tokenizer)
    body = request(kind, f"prompt {seed % 1000} é", limit, stop)
    calm = Client(tokenizer, kind, body)
    calm.read(engine, random.Random(0), None)
    client = Client(tokenizer, kind, body)
    for cut in cuts:
        client.read(engine, rng, cut)
        if client.got.endswith(b"[DONE]\n\n"):
            break
        if client.got and client.resumable.is_complete:
            client.got += b"data: [DONE]\n\n"
            break
        if client.got:
            client.lose()
    else:
        client.read(engine, rng, None)
    got, expected = client.reading(), calm.reading()
    texts = sorted((got.pop("text"), expected.pop("text")), key=len)
    assert got == expected
    # What a stop text takes back may have been sent already, if events were cut there.
    assert texts[1].startswith(texts[0])
    assert len(texts[1]) - len(texts[0]) <= max((len(one) - 1 for one in stop or []), default=0)


@pytest.mark.parametrize("kind", ["completions", "generate"])
def test_what_was_sent_is_not_decoded_again(tokenizer: Path, kind: str) -> None:
    client = Client(tokenizer, kind, request(kind, "once", 30))
    client.read(Engine(tokenizer), random.Random(1), 10)
    sent = client.resumable.leg_tokens
    assert sent is not None
    client.lose()
    client.read(Engine(tokenizer), random.Random(1), None)
    body = client.legs[1]
    ids = body["prompt"] if kind == "completions" else body["input_ids"]
    limit = body["max_tokens"] if kind == "completions" else body["sampling_params"]["max_new_tokens"]
    assert limit + len(ids) == 30 + len("once")
    assert sent - 1 <= len(ids) - len("once") <= sent, "at most half a character is computed again"
    assert client.leg.max_output_tokens == limit
    assert len(client.leg.prompts[0]) == len(ids)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sent", [1, 2])
def test_a_stop_text_that_was_begun_is_recognized_elsewhere(tokenizer: Path, kind: str, sent: int) -> None:
    engine = Engine(tokenizer)
    found = 0
    for number in range(20):
        body = request(kind, f"prompt {number}", 40)
        *_, last = engine.steps(kind, body)
        stop = last.text[20:23]
        if not stop.isascii() or not last.text[:20].isascii() or last.text.index(stop) != 20:
            continue  # a character is not a token, or it would stop before
        found += 1
        calm, client = (
            Client(tokenizer, kind, request(kind, f"prompt {number}", 40, [stop])) for _ in range(2)
        )
        calm.read(engine, random.Random(0), None)
        assert calm.reading()["text"].startswith(last.text[:20])
        ahead = 1 if kind == "chat" else 0  # an event names the role
        client.read(engine, Ones(), ahead + 20 + sent)
        client.lose()
        client.read(engine, Ones(), None)
        got = client.reading()
        assert got["ends"] == calm.reading()["ends"]
        assert last.text[:22].startswith(got["text"])
        assert len(got["text"]) >= 20
    assert found > 3


@pytest.mark.parametrize("kind", ["chat", "completions"])
def test_an_answer_ends_once_when_only_its_usage_was_lost(tokenizer: Path, kind: str) -> None:
    engine = Engine(tokenizer)
    calm, client = (Client(tokenizer, kind, request(kind, "x", 9)) for _ in range(2))
    calm.read(engine, Ones(), None)
    body = json.loads(client.leg.forwarded("0" * 32))
    client.read(engine, Ones(), len(list(engine.events(kind, body))) - 2)
    assert not client.resumable.is_complete
    client.lose()
    client.read(engine, Ones(), None)
    assert client.reading() == calm.reading()


def test_a_replica_is_asked_for_one_token_at_least(tokenizer: Path) -> None:
    client = Client(tokenizer, "completions", request("completions", "x", 3))
    ids = Engine(tokenizer).prompt("completions", {"prompt": "abc"})
    choice = {"index": 0, "text": "abc", "token_ids": ids, "prompt_token_ids": [88]}
    client.resumable.pass_on(b"data: " + json.dumps({"id": "1", "choices": [choice]}).encode() + b"\n\n")
    client.lose()
    body = json.loads(client.leg.forwarded("0" * 32))
    assert (body["prompt"], body["max_tokens"]) == ([88, *ids[:2]], 1)


@pytest.mark.parametrize("kind", KINDS)
def test_another_answer_is_never_passed_on(tokenizer: Path, kind: str) -> None:
    client = Client(tokenizer, kind, request(kind, "once", 60, presence_penalty=1.0))
    assert client.call.resume == "repeat"
    client.read(Engine(tokenizer), random.Random(1), 10)
    got = client.got
    client.lose()
    with pytest.raises(Diverged, match="in other words"):
        client.read(Engine(tokenizer, salt=1), random.Random(1), None)
    assert client.got == got


def test_a_tool_call_is_not_begun_again(tokenizer: Path) -> None:
    resumable = Resumable(Client(tokenizer, "chat", request("chat", "once", 9)).call)
    call = {"choices": [{"index": 0, "delta": {"tool_calls": [{"index": 0, "id": "x"}]}}]}
    resumable.pass_on(b"data: " + json.dumps(call).encode() + b"\n\n")
    with pytest.raises(Diverged, match="tool"):
        resumable.next_leg([], lambda ids, hide: "")


@pytest.mark.parametrize(
    ("kind", "change", "way"),
    [
        ("completions", {}, "tokens"),
        ("generate", {}, "tokens"),
        ("chat", {}, "repeat"),
        ("completions", {"temperature": 1}, None),
        ("completions", {"temperature": None}, None),
        ("completions", {"temperature": 1, "seed": 3}, None),
        ("completions", {"temperature": 0, "seed": 3}, "tokens"),
        ("generate", {"sampling_params": {"temperature": 1, "sampling_seed": 3, "max_new_tokens": 5}}, None),
        ("completions", {"temperature": 1, "top_k": 1}, "tokens"),
        ("completions", {"stream": False}, None),
        ("completions", {"n": 2}, None),
        ("completions", {"logprobs": 1}, None),
        ("completions", {"logprobs": 0}, None),
        ("completions", {"return_token_ids": True}, None),
        ("completions", {"session_params": {"id": "x"}}, None),
        ("completions", {"stream_options": {"continuous_usage_stats": True}}, None),
        ("completions", {"prompt": ["a", "b"]}, None),
        ("completions", {"max_tokens": None}, "repeat"),
        ("completions", {"min_tokens": 4}, "tokens"),
        ("completions", {"min_tokens": "4"}, "repeat"),
        ("completions", {"repetition_penalty": 1.0}, "tokens"),
        ("completions", {"repetition_penalty": 1.1}, "repeat"),
        ("completions", {"regex": "a*"}, "repeat"),
        ("completions", {"response_format": {"type": "json_object"}}, "repeat"),
        ("completions", {"echo": True}, "repeat"),
        ("completions", {"an_option_of_tomorrow": 1}, "repeat"),
    ],
)
def test_how_a_stream_can_go_on(kind: str, change: dict[str, Any], way: str | None) -> None:
    body = request(kind, "x", 5) | change
    assert parse(kind, json.dumps(body).encode(), "tiny").resume == way


def test_a_list_of_sampling_parameters_is_no_single_answer() -> None:
    assert (
        continuation("generate", {"text": "x", "stream": True, "sampling_params": [{"temperature": 0}]})
        is None
    )
