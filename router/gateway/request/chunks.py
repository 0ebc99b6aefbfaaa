"""Tokenizes long texts in chunks and caches the tokens of each chunk, because prompts share their beginnings.

Rule. A text is cut at the first safe place after each `CHUNK_CHARS` characters, counted from the last cut. A safe
place is before a space that stands between two lower-case letters. Pre-tokenizers that split words there (GPT-2's
pattern and its descendants) never look across it, so the chunks' tokens, joined, are the text's. Texts that begin
alike are cut alike. Whether a tokenizer is of that kind is tried out when it is loaded; otherwise texts are not cut.
Bound: the cache holds `max_bytes` of texts and tokens, and drops the least recently used. Leaks: text without spaces,
such as Chinese, is not cut, and is tokenized anew each time.
"""

import re
import sys
import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterator
from itertools import pairwise

from tokenizers import Tokenizer

CHUNK_CHARS = 256
MAX_BYTES = 32 << 20

_SAFE = re.compile(r"[a-z](?= [a-z])")

_PROBE = (
    "The quick brown fox, born 1984-03-17 in A.B., didn't jump over 12345678 lazy dogs!  Two  spaces\tand a tab.\n\n"
    "def f(x): return {'a': [1, 2.5e-3]} # código, naïve, 東京 and 🙂 are here; we'll see why it is so ...\r\n"
)


class ChunkedTokenizer:
    """A tokenizer with the cache, without special tokens. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer, max_bytes: int = MAX_BYTES) -> None:
        self._tokenizer = tokenizer
        self._max_bytes = max_bytes
        self._kept: OrderedDict[str, bytes] = OrderedDict()
        self._kept_bytes = 0
        self._lock = threading.Lock()
        self._cuts = self._may_cut()

    def uncached_chars(self, text: str) -> int:
        """How many characters of `text` are not in the cache."""
        return sum(len(part) for part in self.parts(text) if part not in self._kept)

    def tokens(self, text: str) -> bytes:
        """The ids of `text` as little-endian uint32."""
        return b"".join(self.pieces(text))

    def pieces(self, text: str) -> Iterator[bytes]:
        """The same, one chunk after the other."""
        return map(self._part, self.parts(text))

    def parts(self, text: str) -> Iterator[str]:
        """The chunks of `text`."""
        start = 0
        if self._cuts and len(text) > CHUNK_CHARS:
            while found := _SAFE.search(text, start + CHUNK_CHARS):
                yield text[start : found.end()]
                start = found.end()
        yield text[start:] if start else text

    def _part(self, text: str) -> bytes:
        with self._lock:
            known = self._kept.get(text)
            if known is not None:
                self._kept.move_to_end(text)
                return known
        tokens = self._encode(text)
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
