"""Prompts of a stated length: as token ids where the model's vocabulary is known, as text where not.

Programs build prompts through a `Codec` and never look inside, so the same program runs against a model
with one token a byte, one with a real tokenizer, and an endpoint that takes nothing but text. Equal texts encode
equally; what `join` puts first is a prefix.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias, cast

from workloads.programs.call import Prompt, Reply

TOKEN_BYTES = 4
"""Of a packed token id."""


@dataclass(frozen=True, slots=True)
class TextCodec:
    """Prompts are text; a token is taken to be `chars_per_token` characters (4 is usual for English)."""

    chars_per_token: float = 4.0

    def encode(self, text: str) -> Prompt:
        return text

    def cut(self, text: str, tokens: int) -> Prompt:
        """The first `tokens` tokens: exactly, where they can be counted, which this codec cannot."""
        return text[: max(1, round(tokens * self.chars_per_token))]

    def count(self, text: str) -> int:
        return round(len(text) / self.chars_per_token)

    def join(self, *parts: Prompt) -> Prompt:
        return "".join(_text(part) for part in parts)

    def answer(self, reply: Reply) -> Prompt:
        return reply.text


@dataclass(frozen=True, slots=True)
class TokenCodec:
    """Prompts are token ids; `vocabulary` is the model's encode function, without special tokens."""

    vocabulary: Callable[[str], Sequence[int]]

    def encode(self, text: str) -> Prompt:
        return tuple(self.vocabulary(text))

    def cut(self, text: str, tokens: int) -> Prompt:
        return tuple(self.vocabulary(text))[:tokens]

    def count(self, text: str) -> int:
        return len(self.vocabulary(text))

    def join(self, *parts: Prompt) -> Prompt:
        return tuple(token for part in parts for token in _ids(part))

    def answer(self, reply: Reply) -> Prompt:
        """The tokens that the engine sampled, which are what it has in its cache; else its text, encoded."""
        return reply.tokens or tuple(self.vocabulary(reply.text))


@dataclass(frozen=True, slots=True)
class PackedCodec:
    """Prompts are packed token ids, little-endian uint32, one token for each UTF-8 byte of the text: for modelled
    engines, which need no vocabulary, and where a tuple of millions of numbers would be slow."""

    def encode(self, text: str) -> Prompt:
        return _packed(text)

    def cut(self, text: str, tokens: int) -> Prompt:
        return _packed(text)[: TOKEN_BYTES * tokens]

    def count(self, text: str) -> int:
        return len(text.encode())

    def join(self, *parts: Prompt) -> Prompt:
        """Raises TypeError for a part that is not packed."""
        return b"".join(cast("tuple[bytes, ...]", parts))

    def answer(self, reply: Reply) -> Prompt:
        return reply.packed


Codec: TypeAlias = TextCodec | TokenCodec | PackedCodec


def _packed(text: str) -> bytes:
    """UTF-32 is one uint32 for each character, and in Latin-1 each byte is a character."""
    return text.encode().decode("latin-1").encode("utf-32-le")


def _text(part: Prompt) -> str:
    assert isinstance(part, str), "a text prompt is joined from text"
    return part


def _ids(part: Prompt) -> tuple[int, ...]:
    assert isinstance(part, tuple), "a prompt of token ids is joined from token ids"
    return part
