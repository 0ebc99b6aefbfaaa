"""Commands whose options are the fields of a dataclass, and how their values are read."""

from collections.abc import Callable, Mapping
from inspect import signature
from typing import Any, TypeVar

from sglang_fair.common.pairs import split_pairs, typed
from sglang_fair.settings.commands import Mistake

OptionsT = TypeVar("OptionsT")


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
