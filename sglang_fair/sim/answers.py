"""The answers of an emulated or simulated model: each token depends on what stands before it, as in greedy decoding.

So a program that branches on an answer takes the same branch on every engine, a second turn finds the first turn's
answer in the cache, and a replica that continues an answer behind the tokens that are known says the same words. The
digest of all up to the last token that no answer can have seeds PCG64, whose raw output is taken modulo the
vocabulary; of what stands behind, which may have been answered, only the number counts: so many are skipped. A longer
answer begins with the shorter one.
"""

from functools import lru_cache
from hashlib import blake2b

import numpy as np

TOKEN_BYTES = 4
"""Bytes of one token id: little-endian uint32."""

LETTERS = range(97, 123)
"""a to z, where a token is a byte of text."""

_HEAD_BYTES = 4096
"""Prompts about one document begin with the same pieces of this size; those are digested once."""


def answer(prompt: bytes, tokens: int, vocabulary: range = LETTERS) -> bytes:
    """The first `tokens` tokens of the answer to `prompt`, each from `vocabulary`, a range with step 1.

    Prompt and answer are token ids of `TOKEN_BYTES` bytes. The result is the same in every process and release.
    """
    answered = _answered(prompt, vocabulary)
    prompt = prompt[: len(prompt) - answered * TOKEN_BYTES]
    head = len(prompt) // _HEAD_BYTES * _HEAD_BYTES
    digest = _begun(prompt[:head]).copy()
    digest.update(prompt[head:])
    seed = np.frombuffer(digest.digest(), "<u4")
    drawn = np.random.PCG64(seed).advance(answered).random_raw(tokens)
    drawn %= len(vocabulary)
    drawn += vocabulary.start
    return drawn.astype("<u4").tobytes()


def _answered(prompt: bytes, vocabulary: range) -> int:
    """Tokens at the end of `prompt` that an answer could have."""
    tokens = np.frombuffer(prompt, "<u4")[::-1]
    if tokens.size and tokens[0] not in vocabulary:
        return 0
    others = (tokens < vocabulary.start) | (tokens >= vocabulary.stop)
    return int(others.argmax()) if others.any() else len(tokens)


@lru_cache(maxsize=64)
def _begun(head: bytes) -> blake2b:
    """The digest of `head`. Callers copy it before they continue."""
    return blake2b(head, digest_size=16)
