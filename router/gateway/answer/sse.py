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
from router.gateway.request.kinds import NATIVE, Kind
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

COMMENT = END_OF_EVENT + PREFIX
"""Begins a comment behind an event: token ids of a chat (`common.token_ids`)."""

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


class _Counts(msgspec.Struct):
    """A usage, as any of the APIs has it."""

    completion_tokens: Count | None = None
    output_tokens: Count | None = None
    cached_tokens: Count | None = None
    cache_read_input_tokens: Count | None = None
    prompt_tokens_details: _Details | None = None
    input_tokens_details: _Details | None = None

    def usage(self) -> Usage:
        details = self.prompt_tokens_details or self.input_tokens_details
        cached = self.cache_read_input_tokens if self.cached_tokens is None else self.cached_tokens
        output = self.completion_tokens if self.output_tokens is None else self.output_tokens
        return Usage(output or 0, cached if details is None else details.cached_tokens)


class _Answer(msgspec.Struct):
    """What can hold a usage: an answer, an event, or what an event is about."""

    usage: _Counts | None = None
    meta_info: _Counts | None = None
    index: int = 0
    choices: list[msgspec.Raw] = []
    response: "_Answer | None" = None
    message: "_Answer | None" = None


_ANSWER = msgspec.json.Decoder(_Answer)
_ONE_OR_MORE = msgspec.json.Decoder(_Answer | list[_Answer])


def usage_of(kind: Kind, body: bytes) -> Usage | None:
    try:
        found = _ONE_OR_MORE.decode(body)
    except msgspec.MsgspecError:
        return None
    answers = found if isinstance(found, list) else [found]
    return _sum([one.meta_info if kind in NATIVE else one.usage for one in answers])


def stream_of(call: Call) -> "Stream":
    return (TypedStream if call.kind in ENDS else Generated if call.kind == "generate" else Stream)(call)


class Stream:
    """One streamed response, of a chat or a completion. `feed` it the replica's bytes; it returns the client's."""

    def __init__(self, call: Call) -> None:
        self.events = 0
        """Events, or pieces of text, so far: an estimate of the output tokens until a usage comes."""
        self.ended = False
        """The last event has passed: the response is complete."""
        self.rids: set[str] = set()
        """Ids that the replica gave to the samples of a request with n > 1."""
        self._kind = call.kind
        self._part = b""
        """The beginning of an event."""
        self._hide_usage = not call.wants_usage
        self._samples = call.samples
        self._has_comments = call.asks_for_token_ids
        self._learns_rids = call.samples > max(1, len(call.prompts))
        self._usage: Usage | None = None

    def feed(self, chunk: bytes) -> bytes:
        """Takes bytes as they came. Returns the events that are complete, without those hidden from the client."""
        data = self._part + chunk if self._part else chunk
        end = data.rfind(END_OF_EVENT) + len(END_OF_EVENT)
        if end < len(END_OF_EVENT):
            self._part = data
            return b""
        self._part = data[end:]
        return self._pass(data[:end] if self._part else data)

    @property
    def usage(self) -> Usage:
        """The replica's numbers, or an estimate from the number of events."""
        # A chat stream opens each answer with an event that names the role.
        return self._usage or Usage(max(0, self.events - self._samples))

    @property
    def next_number(self) -> int:
        """The sequence number that follows those of the events so far, in a stream that has such."""
        return 0

    def _pass(self, events: bytes) -> bytes:
        """Whole events: reads them, and returns what the client gets."""
        self.events += events.count(END_OF_EVENT)
        if self._has_comments:
            self.events -= events.count(COMMENT) + events.startswith(PREFIX)
        self.ended = self.ended or events.endswith(DONE)
        if self._learns_rids:
            self.rids.update(rid.decode() for rid in _RID.findall(events))
        return self._read(events)

    def _read(self, events: bytes) -> bytes:
        """Reads their usage; what the client gets of them."""
        return self._without_usage(events) if _USAGE.search(events) else events

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
        answer = _answer_in(event)
        if answer is None or answer.choices or answer.usage is None:
            return False
        self._usage = answer.usage.usage()
        return self._hide_usage


class Generated(Stream):
    """One of /generate, whose events are cumulative."""

    def __init__(self, call: Call) -> None:
        super().__init__(call)
        self._latest: dict[int, bytes] = {}
        """By index of the answer."""

    @property
    def usage(self) -> Usage:
        answers = map(_answer_in, self._latest.values())
        return _sum([one.meta_info for one in answers if one is not None]) or super().usage

    def _read(self, events: bytes) -> bytes:
        if self._samples == 1:
            last = events[:-2] if not self.ended else events[: -len(DONE)].removesuffix(END_OF_EVENT)
            if last:
                self._latest[0] = last[last.rfind(END_OF_EVENT) + 2 if END_OF_EVENT in last else 0 :]
            return events
        for event in split(events):
            if (found := _answer_in(event)) is not None:
                self._latest[found.index] = event
        return events


class TypedStream(Stream):
    """One whose events have types: of /v1/responses and /v1/messages."""

    def __init__(self, call: Call) -> None:
        super().__init__(call)
        self._ends, self._with_usage = ENDS[call.kind], _WITH_USAGE[call.kind]
        self._last = b""
        self._output: int | None = None
        self._cached: int | None = None

    @property
    def usage(self) -> Usage:
        return Usage(self.events if self._output is None else self._output, self._cached)

    @property
    def next_number(self) -> int:
        numbers = _SEQUENCE.findall(self._last)
        return int(numbers[-1]) + 1 if numbers else 0

    def _pass(self, events: bytes) -> bytes:
        self._last = events
        self.events += len(_DELTA.findall(events))
        if self._with_usage.search(events):
            for event in filter(self._with_usage.search, split(events)):
                self._count(_answer_in(event[event.find(b"\ndata:") + 1 :]))
        self.ended = self.ended or self._ends.search(events) is not None
        return events

    def _count(self, found: _Answer | None) -> None:
        if found is None or (counts := (found.response or found.message or found).usage) is None:
            return
        usage = counts.usage()
        self._cached = self._cached if usage.cached_tokens is None else usage.cached_tokens
        if found.message is None:  # its beginning says 0
            self._output = usage.output_tokens


def _answer_in(event: bytes) -> _Answer | None:
    try:
        return _ANSWER.decode(data_of(event))
    except msgspec.MsgspecError:
        return None


def _sum(counts: list[_Counts | None]) -> Usage | None:
    """None where nothing is counted."""
    usages = [one.usage() for one in counts if one is not None]
    if not usages:
        return None
    cached = [one.cached_tokens for one in usages if one.cached_tokens is not None]
    return Usage(sum(one.output_tokens for one in usages), sum(cached) if cached else None)


def split(events: bytes) -> Iterator[bytes]:
    """The events, without what ends them."""
    return (event for event in events.split(END_OF_EVENT) if event)


def without_comments(events: bytes) -> tuple[bytes, list[bytes]]:
    """Whole events without the comments among them, and these, without what ends them."""
    if PREFIX not in events:
        return events, []
    kept, found = list[bytes](), list[bytes]()
    for event in events.split(END_OF_EVENT):
        (found if event.startswith(PREFIX) else kept).append(event)
    return END_OF_EVENT.join(kept), found


def data_of(event: bytes) -> bytes:
    return event.removeprefix(b"data:").strip()


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
