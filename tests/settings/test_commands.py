"""A command: what arrives, and how it refuses."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest

from sglang_fair import cli
from sglang_fair.settings.commands import Mistake, Numbers, Option, PassedOn, choices, numbers, run

got: dict[str, Any] = {}


def measure(
    seed: Annotated[int, Option(help="Of the random prompts.")] = 0,
    queued: Annotated[Numbers, numbers("Waiting requests.")] = Numbers(128, 1000),
    policy: Annotated[str, choices(["dlpm", "vtc"], "Which scheduler.")] = "dlpm",
    level: Literal["low", "high"] = "low",
    json: Annotated[Path | None, Option(metavar="FILE", help="Write the result there.")] = None,
    rest: PassedOn = None,
) -> int | None:
    """Measure something [in brackets]."""
    got.update(seed=seed, queued=queued, policy=policy, level=level, json=json, rest=rest)
    if seed == 13:
        raise Mistake("13 is no seed")
    if seed == 14:
        raise KeyboardInterrupt
    return seed or None


def call(*arguments: str) -> int:
    got.clear()
    return run(measure, "sglang-fair bench it", arguments)


def test_defaults() -> None:
    assert call() == 0
    assert got == {
        "seed": 0, "queued": (128, 1000), "policy": "dlpm", "level": "low", "json": None, "rest": None
    }  # fmt: skip


def test_values_and_what_stands_behind_the_dashes() -> None:
    assert (
        call("--seed", "3", "--queued", "5", "--json=a", "--level", "high", "--", "--tp", "2", "--", "x") == 3
    )
    assert got["queued"] == (5,)
    assert got["json"] == Path("a")
    assert got["rest"] == ["--tp", "2", "--", "x"]


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--seed", "x"], 2, "'--seed'"),
        (["--queued", "1,0"], 2, "must be positive whole numbers, separated by commas, not '1,0'"),
        (["--policy", "fair"], 2, "there is no 'fair'; there are dlpm, vtc"),
        (["--level", "middle"], 2, "'middle' is not one of 'low', 'high'"),
        (["--sed", "1"], 2, "No such option: --sed (Possible options: "),
        (["more"], 2, "unexpected argument 'more'"),
        (["--seed", "13"], 2, "13 is no seed"),
        (["--seed", "14"], 130, "interrupted"),
    ],
)
def test_a_mistake_is_one_line(
    arguments: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(*arguments) == code
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("sglang-fair bench it: ")
    assert said in line


def test_a_shell_is_offered_the_commands() -> None:
    asks = {"COMP_WORDS": "sglang-fair ", "COMP_CWORD": "1", "_SGLANG_FAIR_COMPLETE": "complete_bash"}
    command = [sys.executable, "-m", "sglang_fair.cli"]
    done = subprocess.run(command, env=os.environ | asks, capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) >= {*cli.PROGRAMS, "status", "bench", "workers"}
