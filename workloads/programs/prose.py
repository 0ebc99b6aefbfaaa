"""Text for prompts, made from a seed: word problems and articles, many and distinct, of any length.

Every text begins with what is its own (a name, a number, a headline), so two prompts share no prefix
unless the program wants them to: DLPM's bounds are stated for clients that share none (DLPM §3.2).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from itertools import islice
from random import Random
from typing import Protocol

from workloads.programs.call import Prompt
from workloads.programs.codec import Codec


class Source(Protocol):
    """Where a program's text comes from."""

    def sentences(self, rng: Random) -> Iterator[str]:
        """Endless text in pieces; equal for equal states of `rng`. The first piece tells texts apart."""

    def natural_pieces(self, rng: Random) -> int:
        """How many pieces make one text of natural length."""

    def ending(self, rng: Random) -> str:
        """What closes a text, such as the question of a word problem; may be empty."""


def draw(source: Source, rng: Random, codec: Codec, tokens: int | None = None) -> Prompt:
    """One text of exactly `tokens` tokens where `codec` can count them; of natural length when None."""
    if tokens is None:
        pieces = list(islice(source.sentences(rng), source.natural_pieces(rng)))
        return codec.encode(" ".join([*pieces, source.ending(rng)]).strip())
    if tokens < 1:
        raise ValueError(f"a text needs at least 1 token, not {tokens}")
    ending = source.ending(rng)
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


@dataclass(frozen=True, slots=True)
class WordProblems:
    """Questions in the manner of GSM8K, from templates."""

    def sentences(self, rng: Random) -> Iterator[str]:
        who, item = rng.choice(_NAMES), rng.choice(_ITEMS)
        town, boxes = rng.choice(_NAMES_OF_TOWNS), rng.choice(_BOXES)
        yield f"{who} of {town} has {rng.randint(12, 999)} {item} in {rng.randint(2, 40)} {boxes}."
        while True:
            template = rng.choice(_EVENTS)
            yield template.format(
                who=who,
                other=rng.choice(_NAMES),
                item=item,
                second=rng.choice(_ITEMS),
                a=rng.randint(2, 60),
                b=rng.randint(2, 12),
                day=rng.choice(_DAYS),
            )

    def natural_pieces(self, rng: Random) -> int:
        return rng.randint(3, 5)

    def ending(self, rng: Random) -> str:
        return rng.choice(_QUESTIONS)


@dataclass(frozen=True, slots=True)
class Articles:
    """Plausible news prose about nothing, from word lists."""

    def sentences(self, rng: Random) -> Iterator[str]:
        topic, place = rng.choice(_TOPICS), rng.choice(_NAMES_OF_TOWNS)
        year = rng.randint(1890, 2030)
        yield f"{rng.choice(_NAMES)}'s {topic} of {place}, {year}, volume {rng.randint(1, 9999)}."
        while True:
            template = rng.choice(_CLAIMS)
            yield template.format(
                who=f"{rng.choice(_NAMES)} {rng.choice(_SURNAMES)}",
                topic=topic,
                place=rng.choice((place, rng.choice(_NAMES_OF_TOWNS))),
                adjective=rng.choice(_ADJECTIVES),
                noun=rng.choice(_NOUNS),
                second=rng.choice(_NOUNS),
                verb=rng.choice(_VERBS),
                number=rng.randint(3, 9000),
                year=year + rng.randint(0, 12),
            )

    def natural_pieces(self, rng: Random) -> int:
        return rng.randint(25, 40)

    def ending(self, rng: Random) -> str:
        return ""


@dataclass(frozen=True, slots=True)
class Passages:
    """Long text at little cost: a random word that no other text begins with, then passages of one book.

    Two texts have passages in common, but no prefix; only prefixes are cached.
    """

    def sentences(self, rng: Random) -> Iterator[str]:
        return _passages(rng.getrandbits(128))

    def natural_pieces(self, rng: Random) -> int:
        return rng.randint(3, 5)

    def ending(self, rng: Random) -> str:
        return ""


def filler(name: str, codec: Codec, tokens: int) -> Prompt:
    """`tokens` tokens of `Passages`, the same for the same name: for prompts by the million."""
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
    """The passages, the same in every process."""
    sentences = islice(Articles().sentences(seeded("book")), 1, None)
    return tuple(" ".join(islice(sentences, _PASSAGE_SENTENCES)) for _ in range(_PASSAGES))


@dataclass(frozen=True, slots=True)
class Given:
    """Texts that were read from a file. A longer text than one is several, a shorter one is cut."""

    texts: tuple[str, ...]

    def __post_init__(self) -> None:
        if not any(text.strip() for text in self.texts):
            raise ValueError("no text was given")

    def sentences(self, rng: Random) -> Iterator[str]:
        while True:
            yield rng.choice(self.texts)

    def natural_pieces(self, rng: Random) -> int:
        return 1

    def ending(self, rng: Random) -> str:
        return ""


def seeded(*names: object) -> Random:
    """A generator of its own for each tuple of names, the same in every process."""
    return Random("/".join(str(name) for name in names))


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_NAMES: Sequence[str] = _words(
    """
    Ada Bela Carlos Dina Emil Fatima Goran Hana Ivo Jia Kofi Lena Mateo Nadia Omar Priya Quentin Rosa Sven
    Tala Umar Vera Wanda Ximena Yusuf Zora Anders Beatriz Chidi Dolores Elif Farid Greta Hugo Ingrid Jonas
    Keiko Luca
    """
)
_SURNAMES: Sequence[str] = _words(
    """
    Abbott Baran Costa Dvorak Eze Fischer Garcia Haddad Ito Jansen Kowalski Lindgren Moreau Novak Okafor
    Petrov Quist Rossi Sato Tanaka Ueda Varga Weber Xu Yilmaz Zeman
    """
)
_NAMES_OF_TOWNS: Sequence[str] = _words(
    """
    Ashford Brackwater Calder Dunmore Eastmere Farrow Glenholm Harwick Inverley Juniper Kestrel Larkhill
    Marlow Northam Oakridge Pellworth Quarry Redfield Stonebridge Thornbury Upwell Vantage Westering Yarrow
    """
)
_ITEMS: Sequence[str] = _words(
    """
    apples marbles stickers pencils eggs buttons coins cards seashells muffins tulips books beads oranges
    stamps bricks candles ribbons tickets acorns bottles lanterns
    """
)
_BOXES: Sequence[str] = _words(
    """
    boxes bags baskets crates jars drawers trays shelves
    """
)
_DAYS: Sequence[str] = _words(
    """
    Monday Tuesday Wednesday Thursday Friday Saturday Sunday
    """
)
_EVENTS: Sequence[str] = (
    "On {day} {who} gives {a} of them to {other}, who already has {b} times as many.",
    "{other} brings {a} bags with {b} {item} in each bag.",
    "Then {who} sells {a} {item} for ${b} each and buys {second} with half of the money.",
    "Every {day}, {b} out of every {a} {item} get lost on the way home.",
    "{who} trades {a} {item} for {b} {second} with {other}.",
    "After that, {other} splits the {second} equally among {b} friends.",
    "A box holds {b} {item}, and {who} fills {a} boxes before lunch.",
    "The price of {second} rises by {a} percent on {day}.",
    "{other} works {b} hours at ${a} an hour and spends it all on {item}.",
    "It takes {who} {a} minutes to count {b} dozen {item}.",
)
_QUESTIONS: Sequence[str] = (
    "How many are left at the end of the week?",
    "How much money is there in total?",
    "How many does each friend get?",
    "How many more are needed to fill every box?",
    "What is the difference between the two amounts?",
)
_TOPICS: Sequence[str] = (
    "almanac of bridges",
    "history of the harbour",
    "report on the water supply",
    "survey of the old mills",
    "review of the winter market",
    "study of river birds",
    "account of the railway strike",
    "inquiry into the glass works",
    "guide to the orchards",
    "chronicle of the lighthouse",
)
_ADJECTIVES: Sequence[str] = _words(
    """
    narrow costly forgotten ambitious fragile seasonal disputed careful uneven public modest remarkable slow
    practical northern temporary reliable
    """
)
_NOUNS: Sequence[str] = _words(
    """
    bridge council harvest pipeline ferry workshop archive tariff festival reservoir school market turbine
    census railway garden hospital quarry ledger signal contract
    """
)
_VERBS: Sequence[str] = _words(
    """
    delayed repaired praised doubled financed inspected abandoned measured replaced redesigned defended
    surveyed
    """
)
_CLAIMS: Sequence[str] = (
    "According to {who}, the {adjective} {noun} near {place} was {verb} in {year} for {number} crowns.",
    "Few residents expected that the {noun} would outlast the {second}, yet {number} came in {year}.",
    "{who} argued that every {adjective} {noun} depends on a {second} that nobody has {verb}.",
    "The {second} of {place} recorded {number} cases, most of them linked to the {adjective} {noun}.",
    "By {year} the committee had {verb} the {noun} twice, and the {second} remained {adjective}.",
    "In a letter to {place}, {who} called the {topic} a {adjective} attempt to explain the {noun}.",
    "Engineers {verb} the {noun} first, because the {second} could carry only {number} tons.",
    "Critics answered that a {adjective} {second} is no substitute for a {noun} that works.",
    "The figures for {year} show {number} entries, although {who} counted fewer.",
    "What remains of the {noun} can be seen in {place}, beside the {adjective} {second}.",
)
