"""The streams of /v1/responses and /v1/messages: events with names, the last of which ends the answer.

    responses   `response.completed`, `response.incomplete` or `response.failed`, with the usage in it
    messages    `message_start` has the prompt's usage, `message_delta` the answer's; `message_stop` is the end

A name stands at the beginning of a line, where no text of an answer can stand: JSON has no line breaks in its texts.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from router.events import Count
from router.gateway.errors import ApiError
from router.gateway.request.kinds import Kind

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


@dataclass(frozen=True)
class Usage:
    """What an answer came to, as its replica says: tokens of one request, over all its answers. `cached_tokens` is
    None if not reported."""

    output_tokens: int = 0
    cached_tokens: int | None = None


class _Details(msgspec.Struct):
    cached_tokens: Count | None = None


class _Usage(msgspec.Struct):
    """Of both APIs."""

    output_tokens: Count | None = None
    input_tokens_details: _Details | None = None
    cache_read_input_tokens: Count | None = None


class _Answer(msgspec.Struct):
    """What can hold a usage: an answer, an event, or what an event is about."""

    usage: _Usage | None = None
    response: "_Answer | None" = None
    message: "_Answer | None" = None


_ANSWERS = msgspec.json.Decoder(_Answer)


def usage_of(body: bytes) -> Usage | None:
    return _usage(_ANSWERS.decode(body).usage)


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
            usage = _usage(inner.usage if inner is not None else found.usage)
            if usage is None:
                continue
            self._cached = self._cached if usage.cached_tokens is None else usage.cached_tokens
            if found.message is None:  # its beginning says 0
                self._output = usage.output_tokens


def _usage(usage: _Usage | None) -> Usage | None:
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
