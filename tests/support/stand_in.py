"""A stand-in for a replica: it speaks SGLang's HTTP interface and computes each token as a hash of those before it.

So two stand-ins give the same greedy answer, and a test knows it in advance. A sampled token depends on the one before
it (`weights`). A character of two bytes is two tokens, and its text is held back until both are there, as SGLang does.
A prompt that ends in half a character takes the whole one away, as it does at SGLang.

    python -m tests.support.stand_in --port 30000 --tokenizer DIR --step 0.01
"""

import argparse
import asyncio
import json
import math
import random
import struct
import zlib
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiohttp import web
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from router.gateway.request import kinds
from sglang_fair.common.processes import die_with_parent
from sglang_fair.common.swapping import HEADER_MODEL, MISDIRECTED
from sglang_fair.common.token_ids import HEADER, comment
from tests.support import apis

MODEL = "tiny"
UNFINISHED = "\ufffd"
WORDS = "abcdefghi .,é"
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "<{{ message['role'] }}>{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def make_tokenizer(folder: Path) -> Path:
    """`folder` with a byte-level tokenizer: one token a byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={"<s>": 0} | {c: i + 1 for i, c in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<s>"])
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "chat_template": TEMPLATE}))
    return folder


@dataclass
class Step:
    """The answer after one more token."""

    ids: list[int]
    text: str
    finish: dict[str, Any] | None


class Engine:
    """The tokens, answers and events of an engine, without I/O. Another `salt` is another model."""

    def __init__(self, tokenizer: Path, salt: int = 0, rng: random.Random | None = None) -> None:
        """`rng` is what sampled tokens are drawn with."""
        self._rng = rng or random.SystemRandom()
        self._tokenizer = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
        self._salt = salt
        self._words = [int(self._tokenizer.encode(word).ids[0]) for word in WORDS]
        self._first, self._second = self._tokenizer.encode("é").ids

    def prompt(self, kind: str, body: dict[str, Any]) -> list[int]:
        """The token ids of the prompt in `body`; of a batch, those of the first."""
        if kind in ("chat", "responses", "messages", "count_tokens"):
            if body.get("input_ids") is not None:
                return list(body["input_ids"])
            asked = body.get("messages", body.get("input"))
            asked = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
            said = "".join(f"<{one.get('role', '')}>{one.get('content', '')}\n" for one in asked)
            return list(self._tokenizer.encode(f"<s>{said}<assistant>").ids)
        fields = {"completions": "prompt", "embeddings": "input", "generate": "text", "encode": "text"}
        found = body.get(fields[kind]) if kind in fields else ""
        found = body["input_ids"] if found is None else found
        if isinstance(found, list) and not isinstance(found[0], int):
            [found, *_] = found
        return found if isinstance(found, list) else list(self._tokenizer.encode(found).ids)

    def steps(self, kind: str, body: dict[str, Any]) -> Iterator[Step]:
        """The answer, token by token."""
        sampling = body.get("sampling_params") or {} if kind == "generate" else body
        sampling = sampling[0] if isinstance(sampling, list) else sampling
        names = ("max_new_tokens", "max_tokens", "max_output_tokens")
        limit = next((sampling[name] for name in names if sampling.get(name)), 16)
        stops = sampling.get("stop") or []
        stops = [stops] if isinstance(stops, str) else stops
        rng = None if sampling.get("temperature") == 0 else self._rng
        prompt, ids = self.prompt(kind, body), []
        before = self._tokenizer.decode(prompt[-5:])
        while True:
            ids = [*ids, self._next(prompt + ids, rng)]
            text = self._tokenizer.decode(prompt[-5:] + ids)[len(before) :]
            whole = text.removesuffix(UNFINISHED)
            found = [stop for stop in stops if stop in whole]
            if found:
                cut = min(whole.index(stop) for stop in found)
                yield Step(ids, whole[:cut], {"type": "stop", "matched": found[0]})
                return
            if len(ids) >= limit:
                yield Step(ids, text, {"type": "length", "length": limit})
                return
            if not any(whole.endswith(stop[:end]) for stop in stops for end in range(1, len(stop))):
                yield Step(ids, whole, None)  # else held back, as SGLang does

    def _next(self, ids: list[int], rng: random.Random | None) -> int:
        if ids[-1:] == [self._first]:
            return self._second
        state = zlib.crc32(struct.pack(f"<{len(ids)}I", *ids), self._salt)
        if rng is None:
            return self._words[state % len(WORDS)]
        return rng.choices(self._words, self.weights(ids[-1] if ids else 0))[0]

    def weights(self, last: int) -> list[int]:
        """How likely each of `WORDS` is behind the token `last`."""
        return [1 + zlib.crc32(struct.pack("<2I", last, word), self._salt) % 9 for word in self._words]

    def events(
        self,
        kind: str,
        body: dict[str, Any],
        group: Callable[[], int] = lambda: 1,
        *,
        ids_of_chats: bool = False,
    ) -> Iterator[bytes]:
        """The stream that answers `body`; `group` says how many tokens the next event carries at least.

        `ids_of_chats`: as the overlay answers whoever asks for token ids.
        """
        prompt_ids = self.prompt(kind, body)
        if kind in ("responses", "messages"):
            pieces = _pieces(self.steps(kind, body))
            yield from apis.events(
                kinds.PATHS[kind], body.get("request_id", "1"), pieces, MODEL, len(prompt_ids)
            )
            return
        head = {"id": body["rid"], "created": random.randrange(1 << 30), "model": MODEL}
        if kind == "chat":
            yield event_of(chunk(kind, head, {"delta": {"role": "assistant", "content": ""}}))
        text, ids, step, due = "", [], None, group()
        for step in self.steps(kind, body):
            due -= 1
            if due > 0 and step.finish is None:
                continue
            due = group()
            delta, new = step.text[len(text) :], step.ids[len(ids) :]
            first = not ids
            text, ids = text + delta, step.ids
            if kind == "generate":
                yield event_of({"text": step.text, "output_ids": step.ids, "index": 0,
                              "meta_info": meta(body["rid"], step.finish, len(prompt_ids), len(ids))})  # fmt: skip
            elif kind == "completions":
                choice: dict[str, Any] = {"text": delta, "logprobs": None}
                choice["finish_reason"] = step.finish and step.finish["type"]
                if body.get("return_token_ids"):
                    choice["token_ids"] = new
                    if first:
                        choice["prompt_token_ids"] = prompt_ids
                yield event_of(chunk(kind, head, choice))
            else:
                said = b""
                if delta:
                    said = event_of(
                        chunk(kind, head, {"delta": {"content": delta, "reasoning_content": None}})
                    )
                if ids_of_chats:
                    said += comment(len(prompt_ids), new, step.finish and step.finish["type"]).encode()
                if said:
                    yield said
        assert step is not None
        if kind == "chat" and step.finish:
            yield event_of(chunk(kind, head, {"delta": {}, "finish_reason": step.finish["type"]}))
        if kind != "generate" and (body.get("stream_options") or {}).get("include_usage"):
            yield event_of(head | {"choices": [], "usage": usage(len(prompt_ids), len(ids))})
        yield b"data: [DONE]\n\n"

    def whole(self, kind: str, body: dict[str, Any], step: Step) -> dict[str, Any]:
        """The whole answer, for a request without `stream`."""
        prompt_ids = self.prompt(kind, body)
        if kind not in ("chat", "completions", "generate"):
            counts = apis.Counts(len(prompt_ids), len(step.ids))
            return apis.whole(kinds.PATHS[kind], body.get("request_id", "1"), step.text, MODEL, counts)
        if kind == "generate":
            counted = meta(body["rid"], step.finish, len(prompt_ids), len(step.ids))
            return {"text": step.text, "output_ids": step.ids, "meta_info": counted}
        choice = {"index": 0, "finish_reason": step.finish and step.finish["type"]}
        choice |= {"text": step.text} if kind == "completions" else {"message": {"content": step.text}}
        return {"id": body["rid"], "choices": [choice], "usage": usage(len(prompt_ids), len(step.ids))}


def _pieces(steps: Iterator[Step]) -> Iterator[str]:
    """The text of each token."""
    text = ""
    for step in steps:
        yield step.text[len(text) :]
        text = step.text


def meta(rid: str, finish: object, prompt: int, output: int, cached: int = 0) -> dict[str, Any]:
    """What /generate tells of an answer."""
    counts = {"prompt_tokens": prompt, "completion_tokens": output, "cached_tokens": cached}
    return {"id": rid, "finish_reason": finish, **counts}


def usage(prompt: int, output: int, cached: int = 0) -> dict[str, Any]:
    counts = {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}
    return counts | {"prompt_tokens_details": {"cached_tokens": cached}}


def chunk(kind: str, head: dict[str, Any], choice: dict[str, Any]) -> dict[str, Any]:
    name = "chat.completion.chunk" if kind == "chat" else "text_completion"
    return head | {"object": name, "choices": [{"index": 0, "finish_reason": None, **choice}]}


def event_of(data: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(data, separators=(",", ":")).encode() + b"\n\n"


class Server:
    """The engine behind HTTP. It stops when its client leaves, and counts what it has computed."""

    def __init__(self, engine: Engine, step_s: float, model: str = "") -> None:
        """With `model`, requests that must be answered by another one get 421."""
        self.url = ""
        self.aborted: list[str] = []
        self._engine = engine
        self._model = model
        self._step_s = step_s
        self.work = {"requests": 0, "running": 0, "output_tokens": 0, "cancelled": 0, "misdirected": 0}
        self.by_client: dict[str, int] = {}
        self._most_tokens: float = math.inf
        self._may_go_on = asyncio.Event()
        self._may_go_on.set()
        self.app = web.Application(client_max_size=1 << 26)
        for path, kind in PATHS.items():
            self.app.router.add_post(path, self._handler(kind))
        self.app.router.add_post("/abort_request", self._abort)
        for path in ("/ready", "/flush_cache"):
            self.app.router.add_get(path, _nothing)
        self.app.router.add_get("/model_info", _told(apis.MODEL_INFO))
        self.app.router.add_get("/server_info", _told(apis.SERVER_INFO))
        self.app.router.add_get("/work", self._work)
        self.app.router.add_post("/hold", self._hold)

    async def start(self) -> None:
        """Serves in this process's loop, at `url`."""
        self._runner = web.AppRunner(self.app, handler_cancellation=True, shutdown_timeout=0.01)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def close(self) -> None:
        await self._runner.cleanup()

    async def _abort(self, request: web.Request) -> web.Response:
        self.aborted.append((await request.json())["rid"])
        return web.Response()

    async def _work(self, _: web.Request) -> web.Response:
        return web.json_response(self.work | {"by_client": self.by_client})

    async def _hold(self, request: web.Request) -> web.Response:
        self.hold((await request.json())["tokens"])
        return web.Response()

    def hold(self, tokens: int | None) -> None:
        """No answer has more tokens than these, until None comes. All else goes on."""
        self._most_tokens = math.inf if tokens is None else tokens
        self._may_go_on.set() if tokens is None else self._may_go_on.clear()

    def _handler(self, kind: str) -> Callable[[web.Request], Any]:
        async def serve(request: web.Request) -> web.StreamResponse:
            body = await request.json()
            if self._model and request.headers.get(HEADER_MODEL, self._model) != self._model:
                self.work["misdirected"] += 1
                return web.json_response({"message": "it has another model"}, status=MISDIRECTED)
            self.work["requests"] += 1
            self.work["running"] += 1
            try:
                return await self._answer(kind, body, request)
            except (asyncio.CancelledError, ConnectionError):
                self.work["cancelled"] += 1
                raise
            finally:
                self.work["running"] -= 1

        return serve

    async def _answer(self, kind: str, body: dict[str, Any], request: web.Request) -> web.StreamResponse:
        client = request.headers.get("x-fair-client", "")
        if not body.get("stream"):
            steps = []
            for step in self._engine.steps(kind, body):
                steps.append(step)
                if kind not in kinds.WITHOUT_ENGINE | kinds.EMBEDDING:
                    await self._computed(client, len(steps))
            return web.json_response(self._engine.whole(kind, body, steps[-1]))
        response = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        async for event in self._paced(kind, body, client, HEADER in request.headers):
            await response.write(event)
        return response

    async def _paced(
        self, kind: str, body: dict[str, Any], client: str, ids_of_chats: bool
    ) -> AsyncIterator[bytes]:
        tokens = 0
        for event in self._engine.events(kind, body, ids_of_chats=ids_of_chats):
            if _is_token(kind, event):
                tokens += 1
                await self._computed(client, tokens)
            yield event

    async def _computed(self, client: str, tokens: int) -> None:
        """One more token of an answer, which makes so many."""
        await asyncio.sleep(self._step_s)
        if tokens > self._most_tokens:
            await self._may_go_on.wait()
        self.work["output_tokens"] += 1
        self.by_client[client] = self.by_client.get(client, 0) + 1


PATHS = {path: kind for kind, path in kinds.PATHS.items()}


def _is_token(kind: str, event: bytes) -> bool:
    if kind in ("responses", "messages"):
        return event.startswith((b"event: content_block_delta", b"event: response.output_text.delta"))
    return b'"choices":[]' not in event and b"[DONE]" not in event


def _told(what: dict[str, Any]) -> Callable[[web.Request], Any]:
    async def tell(_: web.Request) -> web.Response:
        return web.json_response(what)

    return tell


async def _nothing(_: web.Request) -> web.Response:
    return web.Response()


def main() -> None:
    line = argparse.ArgumentParser()
    line.add_argument("--port", type=int, required=True)
    line.add_argument("--tokenizer", type=Path, required=True)
    line.add_argument("--step", type=float, default=0.01)
    options = line.parse_args()
    die_with_parent()
    server = Server(Engine(options.tokenizer), options.step)
    web.run_app(server.app, host="127.0.0.1", port=options.port, print=None, handler_cancellation=True)


if __name__ == "__main__":
    main()
