"""How a command of this package reads its command line: a function with types, and Typer.

    def main(
        seed: Annotated[int, Option(help="Of the random prompts.")] = 0,
        queued: Annotated[Numbers, Option(parser=Numbers.parse, metavar="N,N", help="Waiting requests.")] = Numbers(8),
        rest: PassedOn = None,
    ) -> int | None:
        '''Time one step.  (The docstring is what --help says; the result is the exit code, None is 0.)'''

    if __name__ == "__main__":
        sys.exit(run(main, "sglang-fair bench scheduler"))

`rest` gets what stands behind `--`; a command without a `PassedOn` parameter takes nothing there. Bad input is one
line on stderr and exit code 2: Typer's own checks, and whatever the function refuses with `Mistake`. Ctrl-C is exit
code 130. `sglang-fair` finds a command through one line in `cli.PROGRAMS` or `cli.BENCHES`, and `python -m MODULE` runs
it too. Tests call `run(main, "name", ["--seed", "1"])`, or the function itself.
"""

import sys
from collections.abc import Callable, Sequence
from functools import wraps
from inspect import signature
from typing import Annotated, Any, TypeVar

import typer
from typer import Argument, Option
from typer.core import TyperCommand
from typer.exceptions import TyperException

__all__ = [
    "Argument",
    "Mistake",
    "Numbers",
    "Option",
    "PassedOn",
    "choices",
    "command",
    "numbers",
    "run",
    "run_app",
]

OptionsT = TypeVar("OptionsT")

BAD_INPUT, INTERRUPTED = 2, 130
"""Exit codes, as a shell knows them."""

CONTEXT_SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 110}

_REST = "[-- ARGUMENTS]"

PassedOn = Annotated[list[str] | None, Argument(metavar=_REST, show_default=False)]
"""Annotation of the parameter that gets the words behind `--`; None where there is no `--`."""


class Mistake(Exception):
    """The user asked for something that cannot be. The text is one line that says what."""


class Numbers(tuple[int, ...]):
    """Positive whole numbers, written `128,1000`."""

    def __new__(cls, *numbers: int) -> "Numbers":
        return super().__new__(cls, numbers)

    def __str__(self) -> str:
        return ",".join(map(str, self))

    @classmethod
    def parse(cls, text: "str | Numbers") -> "Numbers":
        if isinstance(text, Numbers):  # Typer parses defaults too
            return text
        try:
            numbers = cls(*(int(part) for part in text.split(",")))
        except ValueError:
            numbers = cls(0)
        if min(numbers) < 1:
            raise ValueError(f"must be positive whole numbers, separated by commas, not {text!r}")
        return numbers


def numbers(help: str, metavar: str = "N,N") -> Any:
    return Option(parser=Numbers.parse, metavar=metavar, help=help)


def choices(known: Sequence[str], help: str, **more: Any) -> Any:
    """The `Option` of a text that must be one of `known`, which are listed in its help. `more` are other arguments.

    For names that come from a registry. Where they can be written down, annotate the parameter with `Literal`.
    """

    def parse(text: str) -> str:
        if text not in known:
            raise ValueError(f"there is no {text!r}; there are {', '.join(known)}")
        return text

    return Option(parser=parse, metavar="NAME", help=f"{help} One of {', '.join(known)}.", **more)


class Command(TyperCommand):
    """Splits the command line at the first `--`, so that the words behind it arrive untouched.

    Options with a `rich_help_panel` stand under that title in the help.
    """

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """The groups in the order in which their first options are declared."""
        groups: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            if (entry := param.get_help_record(ctx)) is not None:
                title = getattr(param, "rich_help_panel", None) or "Options"
                groups.setdefault(title, []).append(entry)
        for title, entries in groups.items():
            with formatter.section(title):
                formatter.write_dl(entries)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        rest = next((param.name for param in self.params if param.metavar == _REST), None)
        if rest is None:
            return list(super().parse_args(ctx, args))
        split = args.index("--") if "--" in args else len(args)
        behind = args[split + 1 :]
        left = list(super().parse_args(ctx, args[:split]))
        if strays := ctx.params[rest]:
            ctx.fail(f"unexpected argument {strays[0]!r}; arguments for other programs stand behind --")
        ctx.params[rest] = behind or None
        return left


def command(
    options: type[OptionsT],
    act: Callable[[OptionsT], int | None],
    refused: tuple[type[Exception], ...] = (OSError, ValueError, RuntimeError),
) -> Callable[..., int | None]:
    """The command for `run` that calls `act` with its options, the fields of this dataclass. It raises Mistake in place
    of one of `refused`."""

    def call(**given: Any) -> int | None:
        try:
            return act(options(**given))
        except refused as error:
            raise Mistake(str(error)) from None

    call.__doc__ = act.__doc__
    call.__signature__ = signature(options)  # type: ignore[attr-defined]
    return call


def run(
    function: Callable[..., int | None],
    name: str,
    arguments: Sequence[str] | None = None,
    *,
    epilog: str = "",
) -> int:
    """The exit code of `function` for this command line, which is `sys.argv`'s if none is given.

    `name` is what usage and errors call the command, as `sglang-fair bench router`.
    """

    @wraps(function)
    def command(*given: Any, **named: Any) -> int | None:
        try:
            return function(*given, **named)
        except Mistake as error:
            return _say(name, str(error), BAD_INPUT)
        except KeyboardInterrupt:
            return _say(name, "interrupted", INTERRUPTED)

    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command(cls=Command, epilog=epilog or None, context_settings=CONTEXT_SETTINGS)(command)
    return run_app(app, name, arguments)


def run_app(app: typer.Typer, name: str, arguments: Sequence[str] | None = None) -> int:
    """The exit code of an application with one or more commands. What it cannot read is one line on stderr."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        code = typer.main.get_command(app).main(words, prog_name=name, standalone_mode=False)
    except Mistake as error:  # of the parser of a value
        return _say(name, str(error), BAD_INPUT)
    except TyperException as error:  # an option or a command that there is not, or a value of another type
        context = getattr(error, "ctx", None)
        called = context.command_path if context else name
        text = error.format_message().replace("Value error, ", "")
        if not text:  # a group without a command: its help has been shown
            return BAD_INPUT
        return _say(called, f"{text} (see {called} --help)", BAD_INPUT)
    return code if isinstance(code, int) else 0


def _say(name: str, text: str, code: int) -> int:
    print(f"{name}: {text}", file=sys.stderr, flush=True)
    return code
