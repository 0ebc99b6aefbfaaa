"""What a report is made of: claims with their verdicts, tables, figures."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

Verdict: TypeAlias = Literal["yes", "partly", "no"]
VERDICTS: tuple[Verdict, ...] = ("yes", "partly", "no")


@dataclass(frozen=True, slots=True)
class Claim:
    """One sentence of a paper, with the paper's number beside ours."""

    text: str
    paper: str
    ours: str
    holds: Verdict
    why: str = ""
    """What is different here. The page shows it where the claim does not hold."""


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of words and numbers. The heads of the columns name the units."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str | float | None]]
    digits: int = 3
    """Significant digits of its numbers."""

    def __post_init__(self) -> None:
        if any(len(row) != len(self.columns) for row in self.rows):
            raise ValueError(f"table {self.title!r}: a row is not as wide as the head")


@dataclass(frozen=True, slots=True)
class Drawing:
    """How a figure is drawn: `draw` gets an empty matplotlib figure of `inches` (width, height)."""

    draw: "Callable[[Canvas], None]"
    inches: tuple[float, float] = (7.0, 3.6)


@dataclass(frozen=True, slots=True)
class Figure:
    """A drawing with its caption. The file's name is the experiment's id and `name`."""

    name: str
    caption: str
    drawing: Drawing


@dataclass(frozen=True, slots=True)
class Report:
    """What the page shows of one experiment."""

    claims: Sequence[Claim] = ()
    tables: Sequence[Table] = ()
    figures: Sequence[Figure] = ()
    notes: Sequence[str] = ()
    ratios: Mapping[str, float | None] = field(default_factory=dict)
    """Numbers that others compare with theirs, by name."""


def shown(value: str | float | None, digits: int = 3) -> str:
    """A table's entry: text as it is, a dash for None, a number with `digits` significant digits and commas."""
    if value is None:
        return "–"
    if isinstance(value, str):
        return value
    if abs(value) >= 10 ** (digits - 1):
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"
