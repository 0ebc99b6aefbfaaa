"""Who asks a cluster over two networks: clients that always wait, and the official clients of OpenAI and Anthropic."""

import asyncio
import sys
from collections import Counter
from collections.abc import Mapping
from random import Random
from types import ModuleType
from typing import Any

import aiohttp
import anthropic
import httpx
import httpx2
import openai

from tests.support.far_site import FarReplica, FarSite
from tests.support.shares import Shares
from tests.support.site import Seen, read_stream
from tests.support.waiting import eventually

SHARED_TOKENS, OWN_TOKENS, OUTPUT_TOKENS = 256, 32, 24

WATCH_S = 0.2
SHARES_S = 240.0
"""For shares to go on, which takes 20 s where nothing else runs."""


def document(client: str) -> list[int]:
    """What all prompts of a client begin with."""
    random = Random(client)
    return [random.randrange(97, 123) for _ in range(SHARED_TOKENS)]


class Flood:
    """Clients of these weights have as many requests at any time as they have connections, until `stop`."""

    def __init__(self, site: FarSite, weights: Mapping[str, float], connections: int) -> None:
        self.site = site
        self.weights = dict(weights)
        self.outcomes: Counter[str] = Counter()
        self.served: Counter[str] = Counter()
        self._stops = False
        self._shares = {one.name: Shares(weights) for one in site.replicas}
        self._tasks = [
            asyncio.create_task(self._ask(client, number))
            for client in weights
            for number in range(connections)
        ]
        self._tasks += [asyncio.create_task(self._watch(replica)) for replica in site.replicas]

    def got(self) -> dict[str, float]:
        """What each replica served of the one who got least by weight, while all waited there without a break."""
        return {
            name: min(got / self.weights[client] for client, got in shares.got.items())
            for name, shares in self._shares.items()
        }

    async def goes_on(self, times: int = 3) -> None:
        """Each client is served so often again."""
        before = dict(self.served)
        await eventually(
            lambda: (
                self._is_broken() or all(self.served[c] >= before.get(c, 0) + times for c in self.weights)
            ),
            "every client is served",
        )

    async def shares_go_on(self, times_the_bound: float) -> None:
        """Each replica serves clients who all wait there, many times what their shares may differ by."""
        before = self.got()
        bounds = {one.name: (await self.site.book(one))["bound"] for one in self.site.replicas}
        await eventually(
            lambda: (
                self._is_broken()
                or all(
                    got >= before[name] + times_the_bound * bounds[name] for name, got in self.got().items()
                )
            ),
            "clients wait at each replica",
            SHARES_S,
        )

    async def stop(self) -> None:
        """Raises what any of them has seen and must not be."""
        self._stops = True
        await asyncio.gather(*self._tasks)

    async def __aenter__(self) -> "Flood":
        return self

    async def __aexit__(self, *_: object) -> None:
        """Ends them all; who has seen what must not be says so first."""
        for task in self._tasks:
            task.cancel()
        ended = await asyncio.gather(*self._tasks, return_exceptions=True)
        wrong = Counter(str(one) for one in ended if isinstance(one, Exception))
        for text, count in wrong.most_common():
            print(f"{count} times: {text}", file=sys.stderr)

    def failed(self) -> int:
        return self.outcomes.total() - self.outcomes["served"]

    def _is_broken(self) -> bool:
        return any(task.done() for task in self._tasks)

    async def _ask(self, client: str, number: int) -> None:
        random = Random(f"{client} {number}")
        gateway = number % len(self.site.urls)
        while not self._stops:
            prompt = document(client) + [random.randrange(97, 123) for _ in range(OWN_TOKENS)]
            seen = await self._one(client, prompt, gateway)
            if seen.status != 200 or seen.error:
                assert not seen.ended, seen
                self.outcomes["refused" if seen.status != 200 else "broken off"] += 1
                await asyncio.sleep(0.2)
                continue
            told = (seen.ended, len(seen.text), seen.completion_tokens)
            assert told == (True, OUTPUT_TOKENS, OUTPUT_TOKENS), seen
            self.outcomes["served"] += 1
            self.served[client] += 1

    async def _one(self, client: str, prompt: list[int], gateway: int) -> Seen:
        body = {
            "prompt": prompt, "max_tokens": OUTPUT_TOKENS, "temperature": 0, "ignore_eos": True, "stream": True,
            "stream_options": {"include_usage": True},
        }  # fmt: skip
        return await read_stream(
            self.site.http, f"{self.site.urls[gateway]}/v1/completions", body, Seen(), client
        )

    async def _watch(self, replica: FarReplica) -> None:
        """Looks at its books, whenever the cable lets it."""
        while not self._stops:
            try:
                async with asyncio.timeout(2.0):
                    book = await self.site.book(replica)
            except (aiohttp.ClientError, TimeoutError):
                book = None
            if book is not None:
                self._shares[replica.name].see(book)
            await asyncio.sleep(WATCH_S)


class Either:
    """A transport of httpx, or httpx2: one name with several gateways behind it. After an error the next request goes
    to the next of them."""

    def __init__(self, library: ModuleType, site: FarSite, at: int) -> None:
        """`library` is the one whose client has this transport. It begins with the gateway `at`."""
        self._library: Any = library
        self._urls = [self._library.URL(url) for url in site.urls]
        self._inner = self._library.AsyncHTTPTransport(verify=site.tls or True)
        self._at = at

    async def handle_async_request(self, request: Any) -> Any:
        at = self._at
        url = self._urls[at]
        request.url = request.url.copy_with(host=url.host, port=url.port)
        try:
            return await self._inner.handle_async_request(request)
        except self._library.TransportError:
            if self._at == at:
                self._at = (at + 1) % len(self._urls)
            raise

    async def aclose(self) -> None:
        await self._inner.aclose()

    def client(self) -> Any:
        """Whose requests go this way."""
        return self._library.AsyncClient(transport=self, timeout=120.0, trust_env=False)


class Applications:
    """Each asks questions, one after the other, with an official client, whose own retries are its only ones."""

    def __init__(self, site: FarSite, each: int) -> None:
        fronts = range(len(site.urls))
        self._ways = [Either(library, site, at) for library in (httpx, httpx2) for at in fronts]
        clients = [way.client() for way in self._ways]
        self.served: Counter[str] = Counter()
        self.retries = 0
        self.asked_again: Counter[str] = Counter()
        """Streams that broke, and were asked for by the application once more, by whose client."""
        self._said: dict[str, str] = {}
        self._stops = False
        asked = [self._chat, self._stream, self._message, self._message_stream]
        base = f"{site.scheme}://gateway"
        self._openai = [
            openai.AsyncOpenAI(base_url=f"{base}/v1", api_key="k", max_retries=4, http_client=clients[at])
            for at in fronts
        ]
        self._anthropic = [
            anthropic.AsyncAnthropic(
                base_url=base, api_key="k", max_retries=4, http_client=clients[len(fronts) + at]
            )
            for at in fronts
        ]
        self._tasks = [
            asyncio.create_task(self._go(ask, f"{ask.__name__.strip('_')} {number}", number % 2))
            for ask in asked
            for number in range(each)
        ]

    async def goes_on(self, times: int = 3) -> None:
        before = dict(self.served)
        await eventually(
            lambda: (
                any(task.done() for task in self._tasks)
                or all(
                    self.served[task.get_name()] >= before.get(task.get_name(), 0) + times
                    for task in self._tasks
                )
            ),
            "each application is served",
        )

    async def stop(self) -> None:
        """Raises the error that any application was given by its client."""
        self._stops = True
        await asyncio.gather(*self._tasks)
        for way in self._ways:
            await way.aclose()

    async def _go(self, ask: Any, name: str, at: int) -> None:
        task = asyncio.current_task()
        assert task is not None
        task.set_name(name)
        number = 0
        while not self._stops:
            number += 1
            question = f"{name}: question {number % 5} of the day"
            while True:
                try:
                    said = await ask(question, at)
                    break
                except _Broken:
                    self.asked_again["Anthropic" if "message" in name else "OpenAI"] += 1
            assert len(said) == OUTPUT_TOKENS, said
            if "stream" not in name:  # a sampled stream that goes on elsewhere has other words
                assert self._said.setdefault(question, said) == said, (
                    "an answer depends on its question alone"
                )
            self.served[name] += 1

    async def _chat(self, question: str, at: int) -> str:
        raw = await self._openai[at].chat.completions.with_raw_response.create(
            model="default", messages=[{"role": "user", "content": question}], max_tokens=OUTPUT_TOKENS
        )
        self.retries += raw.retries_taken
        answered = raw.parse()
        assert answered.usage is not None
        assert answered.usage.completion_tokens == OUTPUT_TOKENS
        return answered.choices[0].message.content or ""

    async def _stream(self, question: str, at: int) -> str:
        raw = await self._openai[at].chat.completions.with_raw_response.create(
            model="default",
            messages=[{"role": "user", "content": question}],
            max_tokens=OUTPUT_TOKENS,
            stream=True,
        )
        self.retries += raw.retries_taken
        said, finish = "", None
        try:
            async for chunk in raw.parse():
                for choice in chunk.choices:
                    said += choice.delta.content or ""
                    finish = choice.finish_reason or finish
        except (httpx.TransportError, openai.APIConnectionError) as error:
            raise _Broken from error
        assert finish == "length"
        return said

    async def _message(self, question: str, at: int) -> str:
        raw = await self._anthropic[at].messages.with_raw_response.create(
            model="default", messages=[{"role": "user", "content": question}], max_tokens=OUTPUT_TOKENS
        )
        self.retries += raw.retries_taken
        answered = await raw.parse()
        assert answered.usage.output_tokens == OUTPUT_TOKENS
        return "".join(block.text for block in answered.content if block.type == "text")

    async def _message_stream(self, question: str, at: int) -> str:
        raw = await self._anthropic[at].messages.with_raw_response.create(
            model="default",
            messages=[{"role": "user", "content": question}],
            max_tokens=OUTPUT_TOKENS,
            stream=True,
        )
        self.retries += raw.retries_taken
        said, ended = "", False
        try:
            async for event in await raw.parse():
                if event.type == "content_block_delta" and event.delta.type == "text_delta":
                    said += event.delta.text
                ended = ended or event.type == "message_stop"
        except (httpx2.TransportError, anthropic.APIError) as error:
            raise _Broken from error
        assert ended
        return said


class _Broken(Exception):
    """A stream broke with its gateway."""
