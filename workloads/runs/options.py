"""Commands whose options are the fields of a dataclass, and those that all comparisons of schedulers have in common."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Annotated, Any, TypeAlias, TypeVar

from router.placement import PLACEMENTS
from sglang_fair.common.pairs import split_pairs, typed
from sglang_fair.core import POLICIES
from sglang_fair.settings.commands import Mistake, Option
from workloads.clients import Scale
from workloads.runs.case import LOADS, SCHEDULERS

OptionsT = TypeVar("OptionsT")

Traffic, Runs = partial(Option, rich_help_panel="The traffic"), partial(Option, rich_help_panel="The runs")
Number = partial(Traffic, metavar="N")
Duration: TypeAlias = Annotated[float, Traffic(metavar="S", help="Seconds of arrivals in a run.")]
Drain: TypeAlias = Annotated[float, Traffic(metavar="S", help="Longest wait for the well-behaved clients.")]
QuestionTokens: TypeAlias = Annotated[int, Number(help="Tree of thoughts: length of a question.")]
ThoughtTokens: TypeAlias = Annotated[int, Number(help="Tree of thoughts: length of a thought.")]
ArticleTokens: TypeAlias = Annotated[int, Number(help="Judge: length of an article.")]
JudgementTokens: TypeAlias = Annotated[int, Number(help="Judge: length of a judgement.")]


def command(
    options: type[OptionsT],
    act: Callable[[OptionsT], int | None],
    refused: tuple[type[Exception], ...] = (OSError, ValueError, RuntimeError),
) -> Callable[..., int | None]:
    """The command for `commands.run` that calls `act` with its options, an object of this class. Raises Mistake in
    place of one of `refused`."""

    def call(**given: Any) -> int | None:
        try:
            return act(options(**given))
        except refused as error:
            raise Mistake(str(error)) from None

    call.__doc__ = act.__doc__
    call.__signature__ = signature(options)  # type: ignore[attr-defined]
    return call


@dataclass(frozen=True, kw_only=True)
class ComparisonOptions:
    """Of every comparison. Defaults of cases that differ are given by who derives from it."""

    schedulers: Annotated[
        str,
        Option(
            metavar="A+B,...",
            help=f"PLACEMENT+POLICY, comma separated, of {', '.join(PLACEMENTS)} and {', '.join(POLICIES)}.",
        ),
    ] = ",".join(SCHEDULERS)
    duration: Duration = 15.0
    drain: Drain = 5.0
    load: Annotated[
        float | None,
        Traffic(
            metavar="PART",
            help="Each client's rate, as a part of its equal share of the measured capacity. "
            f"[default: {', '.join(f'{app} {load:g}' for app, load in LOADS.items())}]",
            show_default=False,
        ),
    ] = None
    good_clients: Annotated[int, Number(help="Clients beside the one that misbehaves.")] = 3
    question_tokens: QuestionTokens = 546
    thought_tokens: ThoughtTokens = 256
    article_tokens: ArticleTokens = 2701
    judgement_tokens: JudgementTokens = 256
    repeats: Annotated[int, Runs(metavar="N", help="Runs of each; medians are shown.")] = 2
    seed: Annotated[int, Runs(metavar="N", help="Of the programs and their arrivals.")] = 0
    json_file: Annotated[
        Path | None,
        Runs("--json", metavar="FILE", help="Write the last line to FILE too.", show_default=False),
    ] = None

    def case(self, scale: Scale, **more: Any) -> dict[str, Any]:
        """The fields of a `ComparisonCase` that these give, on that scale but for their lengths, and `more`."""
        lengths = ("good_clients", "question_tokens", "thought_tokens", "article_tokens", "judgement_tokens")
        return {
            "schedulers": names(self.schedulers),
            "repeats": self.repeats,
            "duration_s": self.duration,
            "drain_s": self.drain,
            "seed": self.seed,
            "load": self.load,
            "scale": replace(scale, **{name: getattr(self, name) for name in lengths}),
            **more,
        }


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
