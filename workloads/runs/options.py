"""How values of the commands' options are read."""

from collections.abc import Mapping

from sglang_fair.common.pairs import split_pairs, typed


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
