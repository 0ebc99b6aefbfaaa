"""Completion: each shell's own script asks the command, and is offered what the program that is named would read."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from router.placement import PLACEMENTS
from sglang_fair import cli
from sglang_fair.settings.commands import COMPLETES, complete_words, drop_words
from sglang_fair.settings.setting import settings_of
from sglang_fair.settings.table import SECTIONS


def bash(line: str, at: int) -> dict[str, str]:
    return {"COMP_WORDS": line, "COMP_CWORD": str(at)}


def other(text: str) -> dict[str, str]:
    return {"_TYPER_COMPLETE_ARGS": text}


class TestTheWordsOfALine:
    @pytest.mark.parametrize(
        ("environ", "words"),
        [
            (bash("sglang-fair", 1), []),
            (bash("sglang-fair clu", 1), []),
            (bash("sglang-fair cluster ", 2), ["cluster"]),
            (bash("sglang-fair\ncluster\n--policy", 2), ["cluster"]),
            (bash("sglang-fair cluster x", 1), []),
            ({"COMP_WORDS": "sglang-fair cluster"}, []),
            (other("sglang-fair clu"), []),
            (other("sglang-fair cluster "), ["cluster"]),
            (other("sglang-fair bench serve --r"), ["bench", "serve"]),
            ({}, []),
        ],
    )
    def test_those_that_are_complete(self, environ: dict[str, str], words: list[str]) -> None:
        assert complete_words(environ) == words

    @pytest.mark.parametrize(
        ("environ", "count", "left"),
        [
            (bash("sglang-fair cluster --pol", 2), 1, bash("sglang-fair --pol", 1)),
            (bash("sglang-fair bench serve ", 3), 2, bash("sglang-fair ", 1)),
            (bash("sglang-fair cl", 1), 0, bash("sglang-fair cl", 1)),
            (other("sglang-fair cluster --policy 'a b"), 1, other("sglang-fair --policy 'a b")),
            (other("sglang-fair bench serve --r"), 2, other("sglang-fair --r")),
        ],
    )
    def test_without_those_that_named_the_program(
        self, environ: dict[str, str], count: int, left: dict[str, str]
    ) -> None:
        drop_words(environ, count)
        assert environ == left


def ask(line: str) -> list[str]:
    """What bash is told about the last word of a line."""
    environ = {**os.environ, **bash(line, line.count(" ")), COMPLETES: "complete_bash"}
    done = subprocess.run(
        [sys.executable, "-m", "sglang_fair.cli"], env=environ, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout.split()


def test_commands_are_offered() -> None:
    assert set(ask("sglang-fair ")) >= {*cli.PROGRAMS, "status", "bench", "workers"}


@pytest.mark.slow
def test_options_are_those_of_the_program_that_is_named() -> None:
    for section in ("cluster", "router"):
        flags = {one.flag for one in settings_of(SECTIONS[section]).values() if not one.about.behind_dashes}
        assert set(ask(f"sglang-fair {section} --")) == flags | {"--config", "--print-config", "--help"}


@pytest.mark.slow
def test_values_are_those_of_the_registry() -> None:
    assert ask("sglang-fair router --placement d") == [name for name in PLACEMENTS if name.startswith("d")]
    assert ask("sglang-fair cluster --config ") == [], "the shell offers files"


@pytest.mark.slow
@pytest.mark.parametrize("program", ["tenants add", "top", "install", "bench serve"])
def test_programs_without_settings_answer_too(program: str) -> None:
    assert "--help" in ask(f"sglang-fair {program} -")


SHELLS = {
    "bash": (
        ("--norc",),
        "COMP_WORDS=(sglang-fair cluster --placement d2lpm-q) COMP_CWORD=3\n"
        "_sglang_fair_completion sglang-fair && echo ${COMPREPLY[@]}",
    ),
    "fish": (("--no-config",), "complete -C 'sglang-fair cluster --placement d2lpm-q'"),
    # The script is for the line editor: here its function runs, and what it would offer is printed.
    "zsh": (
        ("-f",),
        '_arguments() { print -r -- "$@" }\n'
        "words=(sglang-fair cluster --placement d2lpm-q) CURRENT=4\n"
        "_sglang_fair_completion",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("shell", SHELLS)
def test_the_script_of_a_shell_asks_the_command(shell: str, tmp_path: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    command = tmp_path / "sglang-fair"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m sglang_fair.cli "$@"\n')
    command.chmod(0o755)

    def run(*words: str) -> str:
        env = {
            **os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "HOME": str(tmp_path),
            # Typer's own switch: the shell is named, not found among the parents of this process.
            "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1",
        }  # fmt: skip
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60, env=env)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    script = tmp_path / "script"
    script.write_text(run("sglang-fair", "--show-completion", shell))
    options, code = SHELLS[shell]
    begin = "autoload -Uz compinit && compinit -u\n" if shell == "zsh" else ""
    shown = run(shell, *options, "-c", f"{begin}source {script}\n{code}")
    assert re.findall(r"[\w-]*d2lpm-q[\w-]*", shown) == ["d2lpm-queue"]
