"""A stream that is cut anywhere and goes on from another engine reads as if it had not been cut."""

import json
import random
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.gateway.answer.resume import Diverged, Resumable
from router.gateway.answer.sse import stream_of
from router.gateway.request.call import Call, Names
from router.gateway.request.intake import Tokens
from router.gateway.request.parse import parse
from sglang_fair.common.token_ids import PREFIX, comment
from tests.support.budget import examples
from tests.support.stand_in import Engine

KINDS = ("chat", "completions", "generate")
COUNTED = ("prompt_tokens", "completion_tokens", "total_tokens")


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


def event_of_chat(text: str) -> bytes:
    chunk = {"id": "1", "choices": [{"index": 0, "delta": {"content": text}}]}
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


class Ones(random.Random):
    """Chooses the first: every token its own event. All else is drawn by `rng`."""

    def __init__(self, rng: random.Random | None = None) -> None:
        super().__init__()
        self._rng = rng or random.Random(0)

    def choice(self, seq: Any) -> Any:
        return seq[0]

    def randrange(self, *args: Any) -> int:
        return self._rng.randrange(*args)


@cache
def tokens_of(folder: Path) -> Tokens:
    return Tokens(folder)


class Client:
    """One client's stream, over as many engines as it takes."""

    def __init__(self, tokenizer: Path, kind: str, body: dict[str, Any]) -> None:
        self.call: Call = parse(kind, json.dumps(body).encode(), Names("tiny"))
        self.tokens = tokens_of(tokenizer)
        self.resumable = Resumable(self.call)
        self.leg: Call = self.call
        self.got = b""
        self.legs: list[dict[str, Any]] = []

    def read(self, engine: Engine, rng: random.Random, events: int | None) -> None:
        """`events` of the leg's stream, or all, in pieces of any length."""
        self.legs.append(json.loads(self.leg.forwarded(f"{len(self.legs):032x}")))
        with_ids = self.call.asks_for_token_ids
        made = engine.events(
            self.call.kind, self.legs[-1], lambda: rng.choice((1, 1, 2, 5)), ids_of_chats=with_ids
        )
        sent = list(made)
        data = b"".join(sent if events is None else sent[:events])
        if events is not None and events < len(sent):
            part = sent[events]
            # A replica that has not sent any ids yet may be one that sends none.
            whole = len(part) if PREFIX in data or not with_ids else part.find(b"\n\n") + 2
            data += part[: rng.randrange(whole)]
        stream = stream_of(self.leg)
        while data:
            size = rng.randrange(1, 400)
            if shown := stream.feed(data[:size]):
                self.got += self.resumable.pass_on(shown)
            data = data[size:]

    def lose(self) -> None:
        prompt, decode = self.tokens.ids(self.call), self.tokens.text
        said = self.resumable.can_go_on(prompt, decode)
        assert said is self.resumable.can_go_on(prompt, decode), "asking changes nothing"
        try:
            self.leg, _ = self.resumable.next_leg(prompt, decode)
        except Diverged:
            assert not said
            raise
        assert said

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
            "usage": [
                {name: chunk["usage"][name] for name in COUNTED} for chunk in chunks if not chunk["choices"]
            ],
            "names": {chunk["id"] for chunk in chunks},
            "times": len({chunk["created"] for chunk in chunks}),
        }


def with_losses(client: Client, engine: Engine, cuts: list[int], rng: random.Random) -> None:
    """Reads a whole stream, and loses the replica after each of `cuts` events of a leg."""
    for cut in cuts:
        client.read(engine, rng, cut)
        if client.got.endswith(b"[DONE]\n\n"):
            return
        if client.got and client.resumable.is_complete:
            client.got += client.resumable.closing() + b"data: [DONE]\n\n"
            return
        if client.got:
            client.lose()
    client.read(engine, rng, None)


def test_a_tool_call_is_not_begun_again(tokenizer: Path) -> None:
    resumable = Resumable(Client(tokenizer, "chat", request("chat", "once", 9)).call)
    call = {"choices": [{"index": 0, "delta": {"tool_calls": [{"index": 0, "id": "x"}]}}]}
    resumable.pass_on(b"data: " + json.dumps(call).encode() + b"\n\n")
    with pytest.raises(Diverged, match="tool"):
        resumable.next_leg([], lambda ids, hide: "")


# -- sampled streams


def sampled(kind: str, text: str, limit: int, **more: Any) -> dict[str, Any]:
    """A request whose tokens are drawn."""
    body = request(kind, text, limit, **more)
    holder = body["sampling_params"] if kind == "generate" else body
    holder["temperature"] = 1.0
    return body


@settings(max_examples=examples(210))
@given(
    kind=st.sampled_from(KINDS),
    limit=st.integers(1, 40),
    greedy=st.none() | st.sampled_from([[], ["a"], ["bc", "é."], ["abcdef", "d"]]),
    cuts=st.lists(st.integers(1, 45), max_size=4),
    seed=st.integers(0, 2**32),
)
def test_a_stream_is_whole_wherever_it_is_cut(
    tokenizer: Path, kind: str, limit: int, greedy: list[str] | None, cuts: list[int], seed: int
) -> None:
    """A greedy one, with stop texts, reads as if it had not been cut. Of a sampled one no token is lost, none comes
    twice, and the text is that of the tokens, also in the middle of a character."""
    rng, text = random.Random(seed), f"prompt {seed % 1000} é"
    engine = Engine(tokenizer, rng=rng)
    body = sampled(kind, text, limit) if greedy is None else request(kind, text, limit, greedy)
    client = Client(tokenizer, kind, body)
    with_losses(client, engine, cuts, rng)
    got = client.reading()
    assert b"token_ids" not in client.got
    if greedy is not None:
        calm = Client(tokenizer, kind, body)
        calm.read(engine, random.Random(0), None)
        assert got == calm.reading()
        return
    client.resumable._read_all()
    ids, prompt = list(client.resumable._ids), client.tokens.ids(client.call)
    assert len(ids) == limit
    before = client.tokens.text(prompt[-5:])
    assert got["text"] == client.tokens.text(prompt[-5:] + ids)[len(before) :]
    if kind == "generate":
        assert (got["ends"], len(got["ids"])) == (1, limit)
        counts = got["meta"]
    else:
        assert got["ends"] == ["length"]
        [counts] = got["usage"]
    assert (counts["prompt_tokens"], counts["completion_tokens"]) == (len(prompt), limit)
    assert len(got["names"]) == 1
    for leg in client.legs[1:]:
        assert len(Engine(tokenizer).prompt(kind, leg)) >= len(prompt)


def test_what_a_sampler_counts_is_carried_on(tokenizer: Path) -> None:
    more = {
        "frequency_penalty": 0.5,
        "logit_bias": {"7": 2.0},
        "min_tokens": 9,
        "stop_token_ids": [3],
        "seed": 4,
        "cache_salt": "mine",
    }
    client = Client(tokenizer, "completions", sampled("completions", "x", 20, **more))
    ids = [7, 8, 7, 9]
    text = client.tokens.text(ids)
    choice = {"index": 0, "text": text, "token_ids": ids, "prompt_token_ids": [88]}
    client.resumable.pass_on(b"data: " + json.dumps({"id": "1", "choices": [choice]}).encode() + b"\n\n")
    client.lose()
    body = json.loads(client.leg.forwarded("0" * 32))
    assert (body["prompt"], body["max_tokens"], body["min_tokens"]) == ([88, *ids], 16, 5)
    assert body["logit_bias"] == {"7": 1.0, "8": -0.5, "9": -0.5}
    assert (body["frequency_penalty"], body["seed"], body["stop_token_ids"]) == (0.5, 4, [3])
    assert body["cache_salt"] == client.call.body["cache_salt"], "it stays in its group"


@pytest.mark.parametrize("kind", KINDS)
def test_a_stop_text_that_a_stream_may_have_begun(tokenizer: Path, kind: str) -> None:
    """SGLang holds such tokens back; another engine's stream is ended, and not continued past a stop text."""
    engine = Engine(tokenizer, rng=random.Random(3))
    client = Client(tokenizer, kind, sampled(kind, "x", 20))
    client.read(engine, Ones(), 6)
    begun = client.resumable
    begun._read_all()
    last = begun._text[-1]
    for stop, goes_on in ((f"{last}#", False), (f"#{last}", True), (last, True)):
        other = Client(tokenizer, kind, sampled(kind, "x", 20, stop=[stop]))
        other.resumable.pass_on(b"")
        other.resumable.__dict__.update(begun.__dict__ | {"_call": other.call})
        if goes_on:
            other.resumable.next_leg(other.tokens.ids(other.call), other.tokens.text)
        else:
            with pytest.raises(Diverged, match="stop text"):
                other.resumable.next_leg(other.tokens.ids(other.call), other.tokens.text)


def test_a_chat_without_token_ids_is_not_continued(tokenizer: Path) -> None:
    """As of a replica that has no overlay."""
    client = Client(tokenizer, "chat", sampled("chat", "x", 20))
    client.resumable.pass_on(event_of_chat("abc"))
    with pytest.raises(Diverged, match="token ids are not known"):
        client.lose()


def test_a_stream_of_another_prompt_or_other_text_is_not_continued(tokenizer: Path) -> None:
    for prompt_tokens, text, said in (
        (3, "abc", "prompt's tokens"),
        (None, "<think>abc", "text is not that"),
    ):
        client = Client(tokenizer, "chat", sampled("chat", "x", 20))
        prompt = client.tokens.ids(client.call)
        ids = Engine(tokenizer).prompt("completions", {"prompt": text})
        told = comment(prompt_tokens or len(prompt), ids, None).encode()
        client.resumable.pass_on(event_of_chat("abc") + told)
        with pytest.raises(Diverged, match=said):
            client.lose()


def test_text_that_looks_like_a_comment_is_the_client_s(tokenizer: Path) -> None:
    client = Client(tokenizer, "chat", sampled("chat", "x", 20))
    event = event_of_chat(": token_ids x\n\n: token_ids y")
    assert client.resumable.pass_on(event + comment(9, [5], None).encode()) == event


def test_text_of_a_chat_waits_for_its_token_ids(tokenizer: Path) -> None:
    client = Client(tokenizer, "chat", sampled("chat", "x", 20))
    said, engine = [event_of_chat(text) for text in "abc"], Engine(tokenizer)
    ids = [comment(9, engine.prompt("completions", {"prompt": text}), None).encode() for text in "abc"]
    assert client.resumable.pass_on(said[0]) == said[0], "its replica may be one that sends none"
    assert client.resumable.pass_on(ids[0] + said[1]) == b""
    assert client.resumable.pass_on(ids[1]) == said[1]
    assert client.resumable.pass_on(said[2]) == b""
    assert client.resumable.leg_tokens == 2
    assert client.resumable._text == "ab", "what waits was not sent"


DRAW: dict[str, Any] = {"temperature": 1}
GOES_ON: list[tuple[str, dict[str, Any], bool, list[dict[str, Any]]]] = [
    ("completions", {}, True, [
        {}, {"temperature": 0, "seed": 3}, {"min_tokens": 4}, {"repetition_penalty": 1.0}, {"temperature": None},
    ]),
    ("completions", DRAW, True, [
        {}, {"seed": 3}, {"stop": ["x"], "min_tokens": 2, "logit_bias": {"5": 1.5}},
        {"frequency_penalty": 0.5}, {"presence_penalty": 0.0, "repetition_penalty": 1}, {"top_k": 1},
    ]),
    ("chat", {}, True, [{}]),
    ("chat", DRAW, True, [
        {}, {"max_tokens": None}, {"max_completion_tokens": 9},
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
    ]),
    ("generate", {}, True, [
        {}, {"sampling_params": {"temperature": 1, "sampling_seed": 3, "max_new_tokens": 5}},
    ]),
    ("completions", {}, False, [
        {"presence_penalty": 0.5}, {"repetition_penalty": 1.1}, {"max_tokens": None}, {"regex": "a*"},
        {"response_format": {"type": "json_object"}}, {"echo": True}, {"n": 2}, {"an_option_of_tomorrow": 1},
        {"stream": False}, {"logprobs": 1}, {"logprobs": 0}, {"return_token_ids": True},
        {"stream_options": {"continuous_usage_stats": True}}, {"prompt": ["a", "b"]},
    ]),
    ("chat", {}, False, [
        {"tools": [{"type": "function"}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
    ]),
    ("generate", {}, False, [{"sampling_params": [{"temperature": 0, "max_new_tokens": 5}]}]),
]  # fmt: skip
"""Kinds, what their requests have in common, whether they can go on, and what else they have."""


@pytest.mark.parametrize(
    ("kind", "change", "can"),
    [(kind, shared | change, can) for kind, shared, can, changes in GOES_ON for change in changes],
)
def test_which_streams_can_go_on(kind: str, change: dict[str, Any], can: bool) -> None:
    body = request(kind, "x", 5) | change
    assert parse(kind, json.dumps(body).encode(), Names("tiny")).can_go_on is can
