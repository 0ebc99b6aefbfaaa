"""The commands' own functions."""

from collections.abc import Callable, Sequence
from importlib import import_module

from sglang_fair import cli


def main_of(program: str) -> Callable[[Sequence[str]], int]:
    """That of the module which the command `program` becomes."""
    module = import_module(cli.PROGRAMS[program].module)
    found: Callable[[Sequence[str]], int] = (
        getattr(module, "main", None) or import_module(f"{module.__name__}.__main__").main
    )
    return found
