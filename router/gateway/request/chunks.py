"""Tokenizes long texts in chunks and caches the tokens of each chunk, because prompts share their beginnings.

Rule. A text is cut at the first safe place after each `CHUNK_CHARS` characters, counted from the last cut. A safe
place is before a space that stands between two lower-case letters. Pre-tokenizers that split words there (GPT-2's
pattern and its descendants) never look across it, so the chunks' tokens, joined, are the text's. Texts that begin
alike are cut alike. Whether a tokenizer is of that kind is tried out when it is loaded; otherwise texts are not cut.
A chunk that is not known is made of its words, which are what lies between any two safe places: most are known, and a
look-up takes a hundredth of the time that the tokenizer takes. Where many are not, the chunk is tokenized as a whole.
Bound: the cache of chunks holds `max_bytes` of texts and tokens, and drops the least recently used. That of words holds
two generations of `WORDS` short words; what was not asked for during the younger one's life is dropped. Leaks: text
without spaces, such as Chinese, is not cut, and is tokenized anew each time. A client of random words has the common
ones dropped; the tokenizer then takes as long as without a cache, and `LEARNT` words a chunk more.
"""

import re
import sys
import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from itertools import pairwise
from string import ascii_lowercase
from typing import cast

from tokenizers import Tokenizer

CHUNK_CHARS = 256
MAX_BYTES = 32 << 20

WORDS = 1 << 15
"""Words in one generation of the cache."""
WORD_CHARS = 24
"""Longer ones are rare, and are not kept."""
MOST_UNKNOWN = 4
"""Words of a chunk that are tokenized one by one, which takes ten times as long for each as in their chunk."""
LEARNT = 2
"""Words of a chunk that are tokenized besides, where more are unknown."""
MOST_SPLIT_CHARS = 4 * CHUNK_CHARS
"""A longer chunk has no safe place for long: it is no prose."""

_SAFE = re.compile(r"[a-z](?= [a-z])")
_LETTERS = frozenset(ascii_lowercase)
_ENDS = _LETTERS | {""}
"""How what is before the first space of a chunk may end."""

_PROBE = (
    "The quick brown fox, born 1984-03-17 in A.B., didn't jump over 12345678 lazy dogs!  Two  spaces\tand a tab.\n\n"
    "def f(x): return {'a': [1, 2.5e-3]} # código, naïve, 東京 and 🙂 are here; we'll see why it is so ...\r\n"
)


class Words:
    """Tokens of words, each with the space before it, and of several that cannot be cut. Two threads may learn the same
    word; nothing else happens."""

    def __init__(self, most: int = WORDS) -> None:
        self._most = most
        self._young: dict[str, bytes] = {}
        self._old: dict[str, bytes] = {}

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def known(self, words: list[str]) -> list[bytes | None]:
        """The tokens of each of `words`; None where they are not known."""
        found = list(map(self._young.get, words))
        if None in found:
            for at, tokens in enumerate(found):
                if tokens is None and (tokens := self._old.get(words[at])) is not None:
                    found[at] = tokens
                    self.learn(words[at], tokens)
        return found

    def joined(self, words: str) -> bytes | None:
        """The tokens of several words that cannot be cut."""
        return self.known([words])[0]

    def learn(self, word: str, tokens: bytes) -> None:
        """Keeps them, unless `word` alone can stand where no cut is safe."""
        if " " not in word and not (word[:1] in _LETTERS and word[-1:] in _LETTERS):
            return
        if len(self._young) >= self._most:
            self._old, self._young = self._young, {}
        self._young[word] = tokens


def _joined(
    first: str, words: list[str], known: list[bytes | None]
) -> tuple[str, list[str], list[bytes | None]]:
    """The words of a chunk, with their tokens where they are `known`, joined where no cut is safe: what is before the
    first cut, and what each cut is followed by. A known word begins and ends with letters."""
    pieces, tokens = [first], [None]  # type: tuple[list[str], list[bytes | None]]
    may_cut = first[-1:] in _ENDS
    for word, its in zip(words, known, strict=True):
        if may_cut and (its is not None or word[:1] in _LETTERS):
            pieces.append(word)
            tokens.append(its)
        else:
            pieces[-1] += f" {word}"
            tokens[-1] = None
        may_cut = its is not None or word[-1:] in _LETTERS
    return pieces[0], pieces[1:], tokens[1:]


class ChunkedTokenizer:
    """A tokenizer with the cache, without special tokens. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer, max_bytes: int = MAX_BYTES) -> None:
        self._tokenizer = tokenizer
        self._max_bytes = max_bytes
        self._kept: OrderedDict[str, bytes] = OrderedDict()
        self._kept_bytes = 0
        self._lock = threading.Lock()
        self._words = Words()
        self._cuts = self._may_cut()

    def uncached_chars(self, text: str) -> int:
        return sum(len(part) for part in self.parts(text) if part not in self._kept)

    def tokens(self, text: str) -> bytes:
        """The ids of `text` as little-endian uint32."""
        return b"".join(self.pieces(text))

    def pieces(self, text: str) -> Iterator[bytes]:
        """The same, one chunk after the other."""
        return map(self._part, self.parts(text))

    def parts(self, text: str) -> Iterator[str]:
        start = 0
        if self._cuts and len(text) > CHUNK_CHARS:
            while found := _SAFE.search(text, start + CHUNK_CHARS):
                yield text[start : found.end()]
                start = found.end()
        yield text[start:] if start else text

    def _part(self, text: str) -> bytes:
        known = self._kept.get(text)
        if known is not None:
            try:  # noqa: SIM105 (`suppress` would take as long as all of this)
                self._kept.move_to_end(text)
            except KeyError:  # another thread has just dropped it
                pass
            return known
        tokens = self._from_words(text) if self._cuts else self._encode(text)
        size = 2 * len(text) + len(tokens)
        if len(text) > CHUNK_CHARS and size <= self._max_bytes:
            with self._lock:
                if text not in self._kept:
                    self._kept[text] = tokens
                    self._kept_bytes += size
                while self._kept_bytes > self._max_bytes:
                    oldest, its = self._kept.popitem(last=False)
                    self._kept_bytes -= 2 * len(oldest) + len(its)
        return tokens

    def _from_words(self, text: str) -> bytes:
        """The tokens of a chunk, of known words if they are most of it."""
        first, *words = text.split(" ")
        if len(words) <= MOST_UNKNOWN or len(text) > MOST_SPLIT_CHARS:
            return self._encode(text)
        known = self._words.known(words)
        if None in known or first[-1:] not in _ENDS:
            first, words, known = _joined(first, words, known)
            known = [its or self._words.joined(word) for word, its in zip(words, known, strict=True)]
            unknown = dict.fromkeys(word for word, its in zip(words, known, strict=True) if its is None)
            if len(unknown) > MOST_UNKNOWN:
                self._learn([word for word in unknown if len(word) <= WORD_CHARS][:LEARNT])
                return self._encode(text)
            if unknown:
                made = self._learn(unknown)
                known = [made[word] if its is None else its for word, its in zip(words, known, strict=True)]
        tokens = b"".join(cast(list[bytes], known))
        return self._encode(first) + tokens if first else tokens

    def _learn(self, words: Iterable[str]) -> dict[str, bytes]:
        made = {word: self._encode(f" {word}") for word in words}
        for word, tokens in made.items():
            if len(word) <= WORD_CHARS:
                self._words.learn(word, tokens)
        return made

    def _encode(self, text: str) -> bytes:
        [encoding] = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
        ids = array("I", encoding.ids)
        if sys.byteorder == "big":
            ids.byteswap()
        return ids.tobytes()

    def _may_cut(self) -> bool:
        """Whether tokens of this tokenizer never reach across a safe place."""
        added = self._tokenizer.get_added_tokens_decoder().values()
        if self._tokenizer.pre_tokenizer is None or any(" " in one.content for one in added):
            return False
        cuts = [0, *(found.end() for found in _SAFE.finditer(_PROBE)), len(_PROBE)]
        parts = [_PROBE[start:end] for start, end in pairwise(cuts)]
        return b"".join(map(self._encode, parts)) == self._encode(_PROBE)
