"""What an emulated or simulated model says: tokens that depend on the prompt alone.

A program that branches on an answer branches alike on every engine, and a second turn finds the first one's answer in
the cache. The prompt's digest seeds PCG64, whose raw output is taken modulo the vocabulary, so a longer answer begins
with the shorter one.
"""

from functools import lru_cache
from hashlib import blake2b

import numpy as np

TOKEN_BYTES = 4
"""Bytes of one token id: little-endian uint32."""

LETTERS = range(97, 123)
"""a to z, where a token is a byte of text."""


@lru_cache(maxsize=256)  # who caches an answer and who reads it ask one after the other
def answer(prompt: bytes, tokens: int, vocabulary: range = LETTERS) -> bytes:
    """The first `tokens` tokens of the answer to `prompt`, each from `vocabulary`, a range with step 1.

    Prompt and answer are token ids, `TOKEN_BYTES` bytes each. The same in every process and for ever.
    """
    seed = int.from_bytes(blake2b(prompt, digest_size=16).digest(), "little")
    drawn = np.random.PCG64(seed).random_raw(tokens) % np.uint64(len(vocabulary))
    return (drawn + np.uint64(vocabulary.start)).astype("<u4").tobytes()
