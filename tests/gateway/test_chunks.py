"""A text that is tokenized by parts has the tokens that it has as a whole."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

from router.gateway.request.chunks import CHUNK_CHARS, LEARNT, WORD_CHARS, ChunkedTokenizer, Words
from tests.support.budget import examples

LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
PRE: dict[str, Callable[[], pre_tokenizers.PreTokenizer | None]] = {
    "gpt2": lambda: pre_tokenizers.ByteLevel(add_prefix_space=False),
    "llama3": lambda: pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(LLAMA_3), "isolated"), BYTES]),
    "digits": lambda: pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
    "whole": lambda: BYTES,
}
WORDS = [
    "the", "a", "quick", "e", "re", "on", "it's", "1984", "3.14", "é", "東京", "🙂", "--", "x_y", "Word", "\n", "  ",
]  # fmt: skip


def prose(rng: random.Random, words: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(words))


@pytest.fixture(scope="module")
def tokenizers() -> dict[str, Tokenizer]:
    """Trained so that merges reach over spaces wherever the pre-tokenizer lets them."""
    made = {}
    for name, pre in PRE.items():
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre()
        trainer = trainers.BpeTrainer(
            vocab_size=900, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
        )
        rng = random.Random(3)
        probe = "The quick brown fox, didn't jump over lazy dogs! here; we'll see why it is so"
        tokenizer.train_from_iterator([prose(rng, 50) + probe for _ in range(60)], trainer)
        made[name] = tokenizer
    return made


def whole(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


def by_parts(chunks: ChunkedTokenizer, text: str) -> list[int]:
    return [int(one) for one in np.frombuffer(chunks.tokens(text), "<u4")]


@pytest.mark.parametrize("name", list(PRE))
@settings(max_examples=examples(30))
@given(seed=st.integers(0, 2**32), words=st.integers(0, 800), tail=st.text(max_size=20))
def test_the_parts_tokens_are_the_texts(
    tokenizers: dict[str, Tokenizer], name: str, seed: int, words: int, tail: str
) -> None:
    chunks = ChunkedTokenizer(tokenizers[name])
    text = prose(random.Random(seed), words) + tail
    for _ in range(2):
        assert by_parts(chunks, text) == whole(tokenizers[name], text)
    assert "".join(chunks.parts(text)) == text


def test_only_tokenizers_that_split_words_are_given_parts(tokenizers: dict[str, Tokenizer]) -> None:
    text = "the quick " * 400
    assert {name: len(list(ChunkedTokenizer(made).parts(text))) > 1 for name, made in tokenizers.items()} == {
        "gpt2": True,
        "llama3": True,
        "digits": True,
        "whole": False,
    }


def test_a_shared_beginning_is_tokenized_once(tokenizers: dict[str, Tokenizer]) -> None:
    chunks = ChunkedTokenizer(tokenizers["gpt2"])
    shared = prose(random.Random(1), 2000)
    chunks.tokens(shared + " and one end")
    assert chunks.uncached_chars(shared + " and another one") < 2 * CHUNK_CHARS


def test_memory_is_bounded(tokenizers: dict[str, Tokenizer]) -> None:
    chunks = ChunkedTokenizer(tokenizers["gpt2"], max_bytes=20_000)
    for number in range(50):
        text = prose(random.Random(number), 300)
        assert by_parts(chunks, text) == whole(tokenizers["gpt2"], text)
        assert chunks._kept_bytes <= 20_000
        assert chunks._kept_bytes == sum(2 * len(text) + len(kept) for text, kept in chunks._kept.items())
    assert chunks._kept_bytes > 10_000


@pytest.mark.parametrize("name", [name for name in PRE if name != "whole"])
@settings(max_examples=examples(30))
@given(seed=st.integers(0, 2**32), tail=st.text(max_size=20))
def test_tokens_of_known_words_are_the_texts(
    tokenizers: dict[str, Tokenizer], name: str, seed: int, tail: str
) -> None:
    chunks = ChunkedTokenizer(tokenizers[name], max_bytes=0)  # every chunk is made of words
    rng = random.Random(seed)
    for words in (400, 400, 40, 4):
        text = " ".join(rng.choice(WORDS[:6] * 4 + WORDS) for _ in range(words)) + tail
        assert by_parts(chunks, text) == whole(tokenizers[name], text)
    assert len(chunks._words) > 0


def test_words_are_learnt_a_few_at_a_time(tokenizers: dict[str, Tokenizer], monkeypatch: Any) -> None:
    chunks = ChunkedTokenizer(tokenizers["gpt2"], max_bytes=0)
    asked: list[str] = []
    encode = chunks._encode
    monkeypatch.setattr(chunks, "_encode", lambda text: asked.append(text) or encode(text))
    text = " ".join(f"{a}{b}" for a in "abcdefgh" for b in "aeiou")
    chunks.tokens(text)
    assert len(asked) <= 1 + LEARNT
    for _ in range(40):
        chunks.tokens(text)
    asked.clear()
    chunks.tokens(text)
    assert len(asked) <= 1  # all are known; the first one has no space before it


def test_words_that_nobody_asks_for_are_dropped() -> None:
    words = Words(most=100)
    for number in range(10_000):  # a client that makes up words
        words.learn(f"w{number}x", b"made")
        assert len(words) <= 200
        if number % 50 == 0:
            words.learn("common", b"its") if number == 0 else words.known(["common"])
    assert words.known(["common", "w9999x", "w1x"]) == [b"its", b"made", None]


def test_long_words_are_not_kept(tokenizers: dict[str, Tokenizer]) -> None:
    chunks = ChunkedTokenizer(tokenizers["gpt2"], max_bytes=0)
    for letter in "abcdef":
        chunks.tokens(f"the quick on it a e re {letter * (WORD_CHARS + 1)} the quick")
    assert all(len(word) <= WORD_CHARS for word in chunks._words._young)
