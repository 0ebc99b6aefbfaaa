"""Completion of command lines: a shell asks `sglang-fair` itself, by an environment variable, what may come next.

Typer has the scripts for the shells and the answers of one application. Here is what follows from commands having
programs of their own: the program that the line names is asked, as if the line began with it. So what is offered is
what that program reads, and nothing has to be imported for commands that the line does not name.
"""

from collections.abc import MutableMapping

ASKED = "_SGLANG_FAIR_COMPLETE"
"""`complete_SHELL` while a shell asks; Typer makes the name from the program's."""

_WORDS, _AT = "COMP_WORDS", "COMP_CWORD"  # bash
_TEXT = "_TYPER_COMPLETE_ARGS"  # others: the line up to the cursor


def named(environ: MutableMapping[str, str]) -> list[str]:
    """The words behind the command's own that are complete: those before the one at the cursor."""
    if _WORDS in environ:
        try:
            return environ[_WORDS].split()[1 : int(environ.get(_AT, ""))]
        except ValueError:
            return []
    text = environ.get(_TEXT, "")
    words = text.split()[1:]
    return words if text.endswith(" ") else words[:-1]


def drop(environ: MutableMapping[str, str], count: int) -> None:
    """The line as if the first `count` words behind the command's own were not there."""
    if not count:
        return
    if _WORDS in environ:
        environ[_WORDS] = _without(environ[_WORDS], count)
        environ[_AT] = str(int(environ[_AT]) - count)
    else:
        environ[_TEXT] = _without(environ.get(_TEXT, ""), count)


def _without(text: str, count: int) -> str:
    parts = text.split(maxsplit=count + 1)
    return f"{parts[0]} {parts[count + 1] if len(parts) > count + 1 else ''}"
