"""Text for prompts, made from a seed: word problems and articles, many and distinct, of any length.

Every text begins with what is its own (a name, a number, a headline), so two prompts share no prefix
unless the program wants them to: DLPM's bounds are stated for clients that share none (DLPM §3.2).
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from hashlib import blake2b
from importlib.resources import files
from itertools import islice
from random import Random
from typing import NamedTuple

from workloads.programs.call import Prompt
from workloads.programs.codec import Codec

_WORDS: Mapping[str, Sequence[str]] = {
    name: found.split() if isinstance(found, str) else found
    for name, found in json.loads((files(__package__) / "prose.json").read_text(encoding="utf-8")).items()
}
"""Words, and templates of sentences."""


class Source(NamedTuple):
    """Where a program's text comes from."""

    sentences: Callable[[Random], Iterator[str]]
    """Endless text in pieces; equal for equal states of the generator. The first piece tells texts apart."""
    endings: Sequence[str] = ()
    """What closes a text, such as the question of a word problem: one of these."""


def draw(source: Source, rng: Random, codec: Codec, tokens: int) -> Prompt:
    """One text of exactly `tokens` tokens where `codec` can count them."""
    if tokens < 1:
        raise ValueError(f"a text needs at least 1 token, not {tokens}")
    ending = rng.choice(source.endings) if source.endings else ""
    body_tokens = tokens - (codec.count(" " + ending) if ending else 0)
    if not ending or body_tokens < tokens // 2:
        return codec.cut(_at_least(source.sentences(rng), codec, tokens), tokens)
    body = codec.cut(_at_least(source.sentences(rng), codec, body_tokens), body_tokens)
    return codec.join(body, codec.encode(" " + ending))


def _at_least(sentences: Iterator[str], codec: Codec, tokens: int) -> str:
    """So many of the sentences that they hold `tokens` tokens. Counts few times: a count can be slow."""
    pieces: list[str] = []
    length, enough = -1, tokens
    for sentence in sentences:
        pieces.append(sentence)
        length += 1 + len(sentence)
        if length >= enough:
            text = " ".join(pieces)
            found = codec.count(text)
            if found >= tokens:
                return text
            enough = length * tokens // max(1, found)
    raise ValueError("the source of text ran dry")


def _problems(rng: Random) -> Iterator[str]:
    """Questions in the manner of GSM8K, from templates."""
    who, item = rng.choice(_WORDS["names"]), rng.choice(_WORDS["items"])
    town, boxes = rng.choice(_WORDS["towns"]), rng.choice(_WORDS["boxes"])
    yield f"{who} of {town} has {rng.randint(12, 999)} {item} in {rng.randint(2, 40)} {boxes}."
    while True:
        template = rng.choice(_WORDS["events"])
        yield template.format(
            who=who,
            other=rng.choice(_WORDS["names"]),
            item=item,
            second=rng.choice(_WORDS["items"]),
            a=rng.randint(2, 60),
            b=rng.randint(2, 12),
            day=rng.choice(_WORDS["days"]),
        )


def _articles(rng: Random) -> Iterator[str]:
    """Plausible news prose about nothing, from word lists."""
    topic, place = rng.choice(_WORDS["topics"]), rng.choice(_WORDS["towns"])
    year = rng.randint(1890, 2030)
    yield f"{rng.choice(_WORDS['names'])}'s {topic} of {place}, {year}, volume {rng.randint(1, 9999)}."
    while True:
        template = rng.choice(_WORDS["claims"])
        yield template.format(
            who=f"{rng.choice(_WORDS['names'])} {rng.choice(_WORDS['surnames'])}",
            topic=topic,
            place=rng.choice((place, rng.choice(_WORDS["towns"]))),
            adjective=rng.choice(_WORDS["adjectives"]),
            noun=rng.choice(_WORDS["nouns"]),
            second=rng.choice(_WORDS["nouns"]),
            verb=rng.choice(_WORDS["verbs"]),
            number=rng.randint(3, 9000),
            year=year + rng.randint(0, 12),
        )


def filler(name: str, codec: Codec, tokens: int) -> Prompt:
    """`tokens` tokens of `PASSAGES`, the same for the same name: for prompts by the million."""
    digest = blake2b(name.encode(), digest_size=16).digest()
    return codec.cut(_at_least(_passages(int.from_bytes(digest, "little")), codec, tokens), tokens)


def _passages(number: int) -> Iterator[str]:
    """A word for the lower 64 bits of `number`, then the book from where the upper ones say."""
    yield f"{number % 2**64:016x}."
    passages = _book()
    place = number >> 64
    while True:
        yield passages[place % len(passages)]
        place += 1


_PASSAGES, _PASSAGE_SENTENCES = 128, 8


@cache
def _book() -> tuple[str, ...]:
    sentences = islice(_articles(seeded("book")), 1, None)
    return tuple(" ".join(islice(sentences, _PASSAGE_SENTENCES)) for _ in range(_PASSAGES))


WORD_PROBLEMS, ARTICLES = Source(_problems, _WORDS["questions"]), Source(_articles)
PASSAGES = Source(lambda rng: _passages(rng.getrandbits(128)))
"""Long text at little cost: a random word that no other text begins with, then passages of one book. Two texts have
passages in common, but no prefix; only prefixes are cached."""


def given(texts: Sequence[str]) -> Source:
    """Texts that were read from a file. A longer text than one is several, a shorter one is cut."""

    def sentences(rng: Random) -> Iterator[str]:
        while True:
            yield rng.choice(texts)

    return Source(sentences)


def seeded(*names: object) -> Random:
    """A generator of its own for each tuple of names, the same in every process."""
    return Random("/".join(str(name) for name in names))
