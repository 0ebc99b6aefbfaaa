"""Options that the commands which compare schedulers have in common, and how their values are read."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, TypeAlias

from router.placement import PLACEMENTS
from sglang_fair.common.pairs import split_pairs, typed
from sglang_fair.core import POLICIES
from sglang_fair.settings.commands import Option
from workloads.runs.case import LOADS, SCHEDULERS

DEFAULT_SCHEDULERS = ",".join(SCHEDULERS)
TRAFFIC, RUNS = "The traffic", "The runs"
"""Groups of options in the help."""

Schedulers: TypeAlias = Annotated[
    str,
    Option(
        metavar="A+B,...",
        help=f"PLACEMENT+POLICY, comma separated, of {', '.join(PLACEMENTS)} and {', '.join(POLICIES)}.",
    ),
]
Duration: TypeAlias = Annotated[
    float, Option(rich_help_panel=TRAFFIC, metavar="S", help="Seconds of arrivals in a run.")
]
Drain: TypeAlias = Annotated[
    float, Option(rich_help_panel=TRAFFIC, metavar="S", help="Longest wait for the well-behaved clients.")
]
Repeats: TypeAlias = Annotated[
    int, Option(rich_help_panel=RUNS, metavar="N", help="Runs of each; medians are shown.")
]
Seed: TypeAlias = Annotated[
    int, Option(rich_help_panel=RUNS, metavar="N", help="Of the programs and their arrivals.")
]
LoadPart: TypeAlias = Annotated[
    float | None,
    Option(
        rich_help_panel=TRAFFIC,
        metavar="PART",
        help="Each client's rate, as a part of its equal share of the measured capacity. "
        f"[default: {', '.join(f'{app} {load:g}' for app, load in LOADS.items())}]",
        show_default=False,
    ),
]
GoodClients: TypeAlias = Annotated[
    int, Option(rich_help_panel=TRAFFIC, metavar="N", help="Clients beside the one that misbehaves.")
]
QuestionTokens: TypeAlias = Annotated[
    int, Option(rich_help_panel=TRAFFIC, metavar="N", help="Tree of thoughts: length of a question.")
]
ThoughtTokens: TypeAlias = Annotated[
    int, Option(rich_help_panel=TRAFFIC, metavar="N", help="Tree of thoughts: length of a thought.")
]
ArticleTokens: TypeAlias = Annotated[
    int, Option(rich_help_panel=TRAFFIC, metavar="N", help="Judge: length of an article.")
]
JudgementTokens: TypeAlias = Annotated[
    int, Option(rich_help_panel=TRAFFIC, metavar="N", help="Judge: length of a judgement.")
]
JsonFile: TypeAlias = Annotated[
    Path | None,
    Option(
        "--json",
        rich_help_panel=RUNS,
        metavar="FILE",
        help="Write the last line to FILE too.",
        show_default=False,
    ),
]


def names(text: str) -> tuple[str, ...]:
    """Comma-separated names, each once, in order."""
    return tuple(dict.fromkeys(name for name in text.split(",") if name))


def numbers(option: str, text: str) -> tuple[float, ...]:
    """Comma-separated numbers. Raises ValueError."""
    try:
        return tuple(float(word) for word in text.split(",") if word.strip())
    except ValueError:
        raise ValueError(f"{option} takes numbers, separated by commas, not {text!r}") from None


def options_by_name(option: str, texts: list[str]) -> dict[str, str]:
    """The options of each policy or placement, from `NAME:KEY=VALUE,...`. Raises ValueError."""
    found: dict[str, str] = {}
    for text in texts:
        name, colon, values = text.partition(":")
        if not colon or not values:
            raise ValueError(f"{option} is NAME:KEY=VALUE,..., not {text!r}")
        found[name] = values
    return found


def rates(text: str) -> Mapping[str, float]:
    """Programs per second by workload, from `WORKLOAD=RATE,...`. Raises ValueError."""
    pairs = split_pairs(text, "--rates: rate")
    return {workload: typed(rate, float, f"--rates: {workload}") for workload, rate in pairs}
