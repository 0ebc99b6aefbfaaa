"""What a report is made of: claims with their verdicts, tables, figures, notes, and ratios for other programs.

An experiment's `report` yields them in any order; the page shows claims first, then tables, figures and notes. Line
breaks and indents of texts do not count.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from workloads.plots import Figure

Entry: TypeAlias = object
"""Of a table: text, a number, or None, which is shown as a dash."""


@dataclass(frozen=True, slots=True)
class Claim:
    """One sentence of a paper, with the paper's number beside ours."""

    text: str
    paper: str
    ours: str
    holds: "Verdict"
    why: str = ""
    """What is different here. The page shows it where the claim does not hold."""


class Verdict(StrEnum):
    """Whether a claim holds here."""

    YES = "yes"
    PARTLY = "partly"
    NO = "no"

    def claim(self, row: str) -> Claim:
        """`row` has, between bars, what is claimed, what the paper has (nothing: it is our own question), what we have,
        and why that is different."""
        text, paper, ours, why = [part.strip() for part in f"{plain(row)} | ".split("|")][:4]
        return Claim(text, paper or "our own question", ours, self, why)


def graded(holds: bool, partly: bool = False) -> Verdict:
    """yes, or else partly, or else no."""
    return Verdict.YES if holds else Verdict.PARTLY if partly else Verdict.NO


def at_least(value: float, enough: float, nearly: float) -> Verdict:
    """By two bands from below."""
    return graded(value >= enough, value >= nearly)


def at_most(value: float, enough: float, nearly: float) -> Verdict:
    """By two bands from above."""
    return graded(value <= enough, value <= nearly)


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of words and numbers. `head` has the columns' names between bars, with units."""

    title: str
    head: str
    rows: Sequence[Sequence[Entry]]
    digits: int = 3
    """Significant digits of its numbers."""

    def __post_init__(self) -> None:
        if any(len(row) != len(self.columns) for row in self.rows):
            raise ValueError(f"table {self.title!r}: a row is not as wide as the head")

    @property
    def columns(self) -> list[str]:
        return plain(self.head).split(" | ")


Part: TypeAlias = Claim | Table | Figure | str | Mapping[str, float | None]
"""Of a report. A string is a note, a mapping has ratios."""


class Report:
    """What the page shows of one experiment."""

    def __init__(self, parts: Iterable[Part] = ()) -> None:
        every = list(parts)
        self.claims = [one for one in every if isinstance(one, Claim)]
        self.tables = [one for one in every if isinstance(one, Table)]
        self.figures = [one for one in every if isinstance(one, Figure)]
        self.notes = [one for one in every if isinstance(one, str)]
        self.ratios = {name: one for some in every if isinstance(some, Mapping) for name, one in some.items()}
        """Numbers that other programs compare with theirs, by name; None where there is nothing to divide by."""


def plain(text: str) -> str:
    """In one line."""
    return " ".join(text.split())


def shown(value: Entry, digits: int = 3) -> str:
    """A table's entry: text as it is, a dash for None, a number with `digits` significant digits and commas."""
    if value is None:
        return "–"
    if isinstance(value, str):
        return value
    assert isinstance(value, int | float), value
    if abs(value) >= 10 ** (digits - 1):
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"
