"""Server-sent events on their way through: reads the token usage in a response, and lets the bytes pass.

A stream is passed on in whole events only, so that a broken one can still be ended by an event of our own. Events are
parsed only where a usage may be in them. The numbers are the replica's:

    chat, completions   one event with `usage` and no `choices`, before [DONE]; hidden unless asked for
    /generate           `meta_info` in every event, cumulative; the last one of each index counts
    responses           `response.completed`, `response.incomplete` or `response.failed`, with the usage in it
    messages            `message_start` has the prompt's usage, `message_delta` the answer's; `message_stop` is the end

Events of the latter have names, which stand at the beginning of a line. No text of an answer can stand there: JSON has
no line breaks in its texts.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import msgspec

from router.events import Count
from router.gateway.errors import ApiError
from router.gateway.request.call import Call
from router.gateway.request.kinds import Kind
from sglang_fair.common.token_ids import PREFIX

END_OF_EVENT = b"\n\n"

ENDS: Mapping[Kind, re.Pattern[bytes]] = {
    "responses": re.compile(rb"(?m)^event: response\.(?:completed|incomplete|failed)$"),
    "messages": re.compile(rb"(?m)^event: message_stop$"),
}
_WITH_USAGE: Mapping[Kind, re.Pattern[bytes]] = {
    "responses": ENDS["responses"],
    "messages": re.compile(rb"(?m)^event: message_(?:start|delta)$"),
}
"""Events with a usage in them."""
_DELTA = re.compile(rb"(?m)^event: (?:content_block_delta|response\.[a-z_]+(?:\.[a-z_]+)?\.delta)$")
_SEQUENCE = re.compile(rb'"sequence_number"\s*:\s*(\d{1,9})')
DONE = b"data: [DONE]\n\n"

TOKEN_IDS = re.compile(rb',"(?:prompt_)?token_ids":\[[0-9,]*\]')
"""Token ids in a choice. They cannot be part of a text, where the quotes would be escaped."""

COMMENTS = re.compile(rb"(?m)^" + re.escape(PREFIX) + rb"[^\n]*\n\n")
"""Token ids beside the events of a chat (`common.token_ids`)."""

_USAGE = re.compile(rb'"usage"\s*:\s*\{')
_RID = re.compile(rb'"id"\s*:\s*"([0-9a-f]{32})"')


@dataclass(frozen=True)
class Usage:
    """What an answer came to, as its replica says: tokens of one request, over all its answers. `cached_tokens` is
    None if not reported."""

    output_tokens: int = 0
    cached_tokens: int | None = None


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


class _TypedUsage(msgspec.Struct):
    """Of both APIs."""

    output_tokens: Count | None = None
    input_tokens_details: _Details | None = None
    cache_read_input_tokens: Count | None = None


class _Answer(msgspec.Struct):
    """What can hold a usage: an answer, an event, or what an event is about."""

    usage: _TypedUsage | None = None
    response: "_Answer | None" = None
    message: "_Answer | None" = None


_ANSWERS = msgspec.json.Decoder(_Answer)
_OPENAI = msgspec.json.Decoder(_OpenAIAnswer)
_GENERATED = msgspec.json.Decoder(_Generated)
_GENERATED_ONE_OR_MORE = msgspec.json.Decoder(_Generated | list[_Generated])


def usage_of(kind: Kind, body: bytes) -> Usage | None:
    try:
        if kind in ENDS:
            return _typed_usage(_ANSWERS.decode(body).usage)
        if kind != "generate":
            return _openai_usage(_OPENAI.decode(body).usage)
        answers = _GENERATED_ONE_OR_MORE.decode(body)
    except msgspec.MsgspecError:
        return None
    return _sum(answers if isinstance(answers, list) else [answers])


def stream_of(call: Call) -> "Stream | TypedStream":
    return TypedStream(call.kind) if call.kind in ENDS else Stream(call)


class Events:
    """A stream as it comes, a piece at a time."""

    def __init__(self) -> None:
        self._part = b""

    def whole(self, chunk: bytes) -> bytes:
        """The events that are whole with `chunk`; the rest of it is kept."""
        data = self._part + chunk if self._part else chunk
        end = data.rfind(END_OF_EVENT) + len(END_OF_EVENT)
        if end < len(END_OF_EVENT):
            self._part = data
            return b""
        self._part = data[end:]
        return data[:end] if self._part else data


class Stream(Events):
    """One streamed response. `feed` it the replica's bytes; it returns the client's."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        self.events = 0
        """Events so far: an estimate of the output tokens until a usage comes."""
        self.ended = False
        """[DONE] has passed: the response is complete."""
        self.next_number = 0
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


class TypedStream(Events):
    """One streamed answer. `feed` it the replica's bytes; it returns those of whole events."""

    def __init__(self, kind: Kind) -> None:
        super().__init__()
        self.events = 0
        """Pieces of text so far: an estimate of the output tokens until the usage comes."""
        self.ended = False
        """The last event has passed."""
        self.rids: frozenset[str] = frozenset()
        self._ends, self._with_usage = ENDS[kind], _WITH_USAGE[kind]
        self._last = b""
        self._output: int | None = None
        self._cached: int | None = None

    def feed(self, chunk: bytes) -> bytes:
        """Takes what has come and returns the whole events of it."""
        if not (events := self.whole(chunk)):
            return b""
        self._last = events
        self.events += len(_DELTA.findall(events))
        if self._with_usage.search(events):
            self._read(events)
        self.ended = self.ended or self._ends.search(events) is not None
        return events

    @property
    def usage(self) -> Usage:
        """The replica's numbers, or an estimate from the number of events."""
        return Usage(self.events if self._output is None else self._output, self._cached)

    @property
    def next_number(self) -> int:
        """The sequence number that follows those of the events so far."""
        numbers = _SEQUENCE.findall(self._last)
        return int(numbers[-1]) + 1 if numbers else 0

    def _read(self, events: bytes) -> None:
        for event in events.split(END_OF_EVENT):
            if not self._with_usage.search(event):
                continue
            try:
                found = _ANSWERS.decode(event[event.index(b"\ndata:") + 6 :])
            except (ValueError, msgspec.MsgspecError):
                continue
            inner = found.response or found.message
            usage = _typed_usage(inner.usage if inner is not None else found.usage)
            if usage is None:
                continue
            self._cached = self._cached if usage.cached_tokens is None else usage.cached_tokens
            if found.message is None:  # its beginning says 0
                self._output = usage.output_tokens


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


def _typed_usage(usage: _TypedUsage | None) -> Usage | None:
    if usage is None:
        return None
    details = usage.input_tokens_details
    cached = usage.cache_read_input_tokens if details is None else details.cached_tokens
    return Usage(usage.output_tokens or 0, cached)


def error_event(kind: Kind, error: ApiError, number: int = 0) -> bytes:
    """The last event of a stream that cannot go on, as the API of `kind` has it; `number` is its place in the
    stream."""
    match kind:
        case "messages":
            return b"event: error\ndata: " + error.body("anthropic") + END_OF_EVENT
        case "responses":
            code = str(error.code or error.status)
            event = {"type": "error", "code": code, "message": error.message, "param": error.param}
            return (
                b"event: error\ndata: "
                + msgspec.json.encode(event | {"sequence_number": number})
                + END_OF_EVENT
            )
    return b"data: " + error.body() + END_OF_EVENT
