"""`KEY=VALUE,...`: how several options are written in one word."""

from typing import Any

_BOOLEANS = {"true": True, "false": False}
_KINDS = {bool: "true or false", int: "a whole number", float: "a number"}


def split_pairs(text: str, one: str) -> list[tuple[str, str]]:
    """The pairs in `text`, stripped of blanks. `one` is what an error calls an option, as "limit".

    Raises ValueError, in one line, for a part that is no pair, and for a key that is given twice.
    """
    pairs: dict[str, str] = {}
    for pair in filter(None, (pair.strip() for pair in text.split(","))):
        key, equals, value = (part.strip() for part in pair.partition("="))
        if not equals or not key:
            raise ValueError(f"{one}s are KEY=VALUE, separated by commas, and {pair!r:.80} is not one")
        if key in pairs:
            raise ValueError(f"{one} {key!r:.80} is given twice")
        pairs[key] = value
    return list(pairs.items())


def typed(text: str, kind: type, called: str) -> Any:
    """`text` as an int, float, str or bool. ValueError, in one line that begins with `called`, if it is none."""
    try:
        return _BOOLEANS[text.lower()] if kind is bool else kind(text)
    except (KeyError, ValueError):
        raise ValueError(f"{called} must be {_KINDS[kind]}, not {text!r:.80}") from None
