"""Server-sent events on their way through: reads the token usage in a response, and lets the bytes pass.

A stream is passed on in whole events only, so that a broken one can still be ended by an event of our own. Events are
parsed only where a usage may be in them. The numbers are the replica's:

    chat, completions   one event with `usage` and no `choices`, before [DONE]; hidden unless asked for
    /generate           `meta_info` in every event, cumulative; the last one of each index counts
    responses, messages `answer.typed`
"""

import re
from collections.abc import Iterator

import msgspec

from router.events import Count
from router.gateway.answer import typed
from router.gateway.answer.typed import END_OF_EVENT, Events, TypedStream, Usage
from router.gateway.request.call import Call
from router.gateway.request.kinds import Kind
from sglang_fair.common.token_ids import PREFIX

DONE = b"data: [DONE]\n\n"

TOKEN_IDS = re.compile(rb',"(?:prompt_)?token_ids":\[[0-9,]*\]')
"""Token ids in a choice. They cannot be part of a text, where the quotes would be escaped."""

COMMENTS = re.compile(rb"(?m)^" + re.escape(PREFIX) + rb"[^\n]*\n\n")
"""Token ids beside the events of a chat (`common.token_ids`)."""

_USAGE = re.compile(rb'"usage"\s*:\s*\{')
_RID = re.compile(rb'"id"\s*:\s*"([0-9a-f]{32})"')


class _Details(msgspec.Struct):
    cached_tokens: Count | None = None


class _OpenAIUsage(msgspec.Struct):
    completion_tokens: Count | None = None
    prompt_tokens_details: _Details | None = None


class _OpenAIAnswer(msgspec.Struct):
    usage: _OpenAIUsage | None = None
    choices: list[msgspec.Raw] = []


class _Meta(msgspec.Struct):
    completion_tokens: Count = 0
    cached_tokens: Count | None = None


class _Generated(msgspec.Struct):
    meta_info: _Meta | None = None
    index: int = 0


_OPENAI = msgspec.json.Decoder(_OpenAIAnswer)
_GENERATED = msgspec.json.Decoder(_Generated)
_GENERATED_ONE_OR_MORE = msgspec.json.Decoder(_Generated | list[_Generated])


def usage_of(kind: Kind, body: bytes) -> Usage | None:
    try:
        if kind in typed.ENDS:
            return typed.usage_of(body)
        if kind != "generate":
            return _openai_usage(_OPENAI.decode(body).usage)
        answers = _GENERATED_ONE_OR_MORE.decode(body)
    except msgspec.MsgspecError:
        return None
    return _sum(answers if isinstance(answers, list) else [answers])


def stream_of(call: Call) -> "Stream | TypedStream":
    return TypedStream(call.kind) if call.kind in typed.ENDS else Stream(call)


class Stream(Events):
    """One streamed response. `feed` it the replica's bytes; it returns the client's."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        self.events = 0
        """Events so far: an estimate of the output tokens until a usage comes."""
        self.ended = False
        """[DONE] has passed: the response is complete."""
        self.rids: set[str] = set()
        """Ids that the replica gave to the samples of a request with n > 1."""
        self._kind = call.kind
        self._hide_usage = not call.wants_usage
        self._samples = call.samples
        self._has_comments = call.asks_for_token_ids
        self._learns_rids = call.samples > max(1, len(call.prompts))
        self._usage: Usage | None = None
        self._latest: dict[int, bytes] = {}

    def feed(self, chunk: bytes) -> bytes:
        """Takes bytes as they came. Returns the events that are complete, without those hidden from the client."""
        if not (events := self.whole(chunk)):
            return b""
        self.events += events.count(END_OF_EVENT)
        if self._has_comments:
            self.events -= len(COMMENTS.findall(events))
        self.ended = self.ended or events.endswith(DONE)
        if self._learns_rids:
            self.rids.update(rid.decode() for rid in _RID.findall(events))
        if self._kind == "generate":
            self._keep_latest(events)
            return events
        return self._without_usage(events) if _USAGE.search(events) else events

    @property
    def usage(self) -> Usage:
        """The replica's numbers, or an estimate from the number of events."""
        if self._latest:
            answers = []
            for event in self._latest.values():
                try:
                    answers.append(_GENERATED.decode(data_of(event)))
                except msgspec.MsgspecError:
                    continue
            return _sum(answers) or Usage()
        # A chat stream opens each answer with an event that names the role.
        return self._usage or Usage(max(0, self.events - self._samples))

    def _keep_latest(self, events: bytes) -> None:
        if self._samples == 1:
            last = events[:-2] if not self.ended else events[: -len(DONE)].removesuffix(END_OF_EVENT)
            if last:
                self._latest[0] = last[last.rfind(END_OF_EVENT) + 2 if END_OF_EVENT in last else 0 :]
            return
        for event in split(events):
            try:
                self._latest[_GENERATED.decode(data_of(event)).index] = event
            except msgspec.MsgspecError:
                continue

    def _without_usage(self, events: bytes) -> bytes:
        """Looks at the events alone that have a usage: of many that came together it is mostly one."""
        kept, at = [], 0
        for found in _USAGE.finditer(events):
            if found.start() < at:
                continue  # a second one in the same event
            before = events.rfind(END_OF_EVENT, at, found.start())
            start = at if before < 0 else before + len(END_OF_EVENT)
            end = events.find(END_OF_EVENT, found.end()) + len(END_OF_EVENT)
            kept.append(events[at:start])
            if not self._is_usage_alone(events[start:end]):
                kept.append(events[start:end])
            at = end
        return b"".join((*kept, events[at:]))

    def _is_usage_alone(self, event: bytes) -> bool:
        """Reads an event that may have a usage. Whether it is one that is hidden from the client."""
        try:
            answer = _OPENAI.decode(data_of(event))
        except msgspec.MsgspecError:
            return False
        if answer.choices or answer.usage is None:
            return False
        self._usage = _openai_usage(answer.usage)
        return self._hide_usage


def split(events: bytes) -> Iterator[bytes]:
    """The events, without what ends them."""
    return (event for event in events.split(END_OF_EVENT) if event)


def data_of(event: bytes) -> bytes:
    return event.removeprefix(b"data:").strip()


def _openai_usage(usage: _OpenAIUsage | None) -> Usage | None:
    if usage is None:
        return None
    details = usage.prompt_tokens_details
    return Usage(usage.completion_tokens or 0, details.cached_tokens if details else None)


def _sum(answers: list[_Generated]) -> Usage | None:
    metas = [answer.meta_info for answer in answers if answer.meta_info is not None]
    if not metas:
        return None
    cached = [meta.cached_tokens for meta in metas if meta.cached_tokens is not None]
    return Usage(sum(meta.completion_tokens for meta in metas), sum(cached) if cached else None)
