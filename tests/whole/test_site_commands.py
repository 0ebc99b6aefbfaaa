"""The commands that the site shows: those of the first hour are run, in their order, on one cluster; command lines that
start a process for long are read by the program that they start, as `--print-config` does."""

import importlib
import importlib.util
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from sglang_fair.cli import PROGRAMS
from sglang_fair.common import curve
from sglang_fair.settings.table import SECTIONS
from tests.support.budget import is_night
from tests.support.certificates import Certificates
from tests.support.live import lives, living
from tests.support.ports import free_port
from tests.support.waiting import wait_until
from tests.whole.test_pages import WRITTEN, blocks

ROOT = Path(__file__).parents[2]
HOUR = (ROOT / "docs/first-hour.md").read_text(encoding="utf-8")
LIMIT_S = 400.0
"""For one block, on however busy a machine."""


# ---- the first hour


def shell_blocks() -> list[str]:
    """In their order."""
    return re.findall(r"^```sh\n(.*?)^```$", HOUR, flags=re.M | re.S)


class Hour:
    """What the page's commands printed, block by block."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "hour"
        self.printed: dict[str, str] = {}
        """By the first words of a block."""
        bin = folder / "bin"
        bin.mkdir()
        command = bin / "sglang-fair"
        command.write_text(f'#!/bin/sh\nexec {sys.executable} -m sglang_fair.cli "$@"\n')
        command.chmod(0o755)
        self._start = folder
        found = (
            (str(ROOT),) if is_night() else (str(ROOT), os.environ["PYTHONPATH"])
        )  # at night nothing is forked
        self._environment = {
            **os.environ, "PATH": f"{bin}:{os.environ['PATH']}", "PYTHONPATH": os.pathsep.join(found)
        }  # fmt: skip
        self._ports = {str(port): str(free_port()) for port in (8000, 8001, 8002)}
        self.cluster: subprocess.Popen[bytes] | None = None

    def do(self, block: str) -> None:
        """One block, in a shell that has what earlier ones made; a cluster is left to run."""
        for shown, real in self._ports.items():
            block = block.replace(f"127.0.0.1:{shown}", f"127.0.0.1:{real}").replace(
                f"port {shown}", f"port {real}"
            )
        if not is_night() and "weight=" not in block:
            block = block.replace("--duration 15", "--duration 6")
        script = f"set -eo pipefail\n[ ! -e keys.env ] || . ./keys.env\n{block}"
        folder = self.folder if self.folder.is_dir() else self._start
        if "sglang-fair cluster" in block:
            with (self._start / "cluster.log").open("wb") as log:
                self.cluster = subprocess.Popen(
                    ["bash", "-c", block.replace("sglang-fair cluster", "exec sglang-fair cluster")],
                    cwd=folder, env=self._environment, stdout=log, stderr=log, start_new_session=True,
                )  # fmt: skip
            wait_until(self._answers, "the cluster of the first hour", LIMIT_S)
            return
        done = subprocess.run(
            ["bash", "-c", script], cwd=folder, env=self._environment, capture_output=True, text=True,
            check=False, timeout=LIMIT_S,
        )  # fmt: skip
        assert done.returncode == 0, f"{block}\n{done.stdout}{done.stderr}"
        self.printed[block.split("\n")[0][:60]] = done.stdout + done.stderr

    def _answers(self) -> bool:
        assert self.cluster is not None
        assert self.cluster.poll() is None, (self._start / "cluster.log").read_text()
        return "/v1" in (self._start / "cluster.log").read_text() and self._is_ready()

    def _is_ready(self) -> bool:
        code = f"curl -sf -o /dev/null http://127.0.0.1:{self._ports['8000']}/readyz"
        return subprocess.run(["bash", "-c", code], check=False).returncode == 0

    def said(self, word: str) -> str:
        """By the one block that begins so."""
        (text,) = (text for first, text in self.printed.items() if first.startswith(word))
        return text

    def report(self, name: str) -> Mapping[str, Any]:
        """Of `bench serve`: each client's row."""
        found = json.loads((self.folder / name).read_text())
        return {one["client"]: one for one in found["report"]["clients"]}

    def end(self) -> int:
        """Ctrl-C; the exit code."""
        assert self.cluster is not None
        family = [
            psutil.Process(self.cluster.pid),
            *psutil.Process(self.cluster.pid).children(recursive=True),
        ]
        self.cluster.send_signal(signal.SIGINT)
        code = self.cluster.wait(120)
        try:
            wait_until(lambda: not living(family), "the end of all its processes", 60)
        finally:
            for process in living(family):
                process.kill()
        return code


@pytest.fixture(scope="module")
def hour(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hour]:
    made = Hour(tmp_path_factory.mktemp("first"))
    try:
        for block in shell_blocks():
            made.do(block)
        yield made
    finally:
        if made.cluster is not None and made.cluster.poll() is None and lives(made.cluster.pid):
            assert made.end() == 0


@pytest.mark.e2e
@pytest.mark.machine
@pytest.mark.timeout(1500)
class TestTheFirstHour:
    def test_it_answers_who_has_a_key(self, hour: Hour) -> None:
        assert '"completion_tokens":16' in hour.said(". ./keys.env").replace(" ", "")
        assert "missing_api_key" in hour.said("curl -s http")

    def test_alice_gets_what_she_asks_for_beside_a_flood(self, hour: Hour) -> None:
        found = hour.report("shared.json")
        assert found["alice"]["failed"] == found["bob"]["failed"] == 0
        assert found["alice"]["ttft_p50"]["value_s"] < found["bob"]["ttft_p50"]["value_s"]
        assert found["alice"]["share"] > 0.25, "with a ninth of the requests"

    def test_a_weight_of_three_is_three_quarters(self, hour: Hour) -> None:
        found = hour.report("weighted.json")
        assert found["bob"]["fair_share"] == 0.75
        assert found["bob"]["share"] == pytest.approx(0.75, abs=0.08)

    def test_operators_and_clients_are_told(self, hour: Hour) -> None:
        assert "alice" in hour.said("sglang-fair status")
        assert "waited" in hour.said("ID=$(curl")

    def test_a_killed_replica_costs_nobody_an_answer(self, hour: Hour) -> None:
        assert '"usage"' in hour.said("sglang-fair workers list")

    def test_ctrl_c_ends_it(self, hour: Hour) -> None:
        assert hour.end() == 0


# ---- command lines that start something


def started(page: str) -> Iterator[list[str]]:
    """Our programs' command lines on a page, as words."""
    for block in blocks(page):
        for line in block.replace("\\\n", " ").splitlines():
            words = (
                shlex.split(line.strip(), comments=True) if line.strip().startswith("sglang-fair ") else []
            )
            if len(words) > 1 and words[1] in SECTIONS:
                yield words[1:]


LINES = [list(line) for line in dict.fromkeys(tuple(words) for page in WRITTEN for words in started(page))]
KEYS = {"SGLANG_FAIR_ADMIN_KEY": "the operators' key", "SGLANG_FAIR_REPLICA_KEY": "the replicas' key"}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the lines name: keys, certificates, tenants, limits, a configuration file."""
    folder = tmp_path_factory.mktemp("lines")
    Certificates.make(folder)
    curve.make(folder / "keys")
    (folder / "tenants.yaml").write_text("tenants: {}\n")
    (folder / "limits.json").write_text('{"user": 60}')
    (folder / "fair.yaml").write_text("cluster:\n  replicas: 4\n")
    return folder


@pytest.mark.parametrize("line", LINES, ids=[shlex.join(words)[:90] for words in LINES])
def test_the_program_reads_it(
    line: list[str], files: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(files)
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    section, *words = line
    split = words.index("--") if "--" in words else len(words)
    module = PROGRAMS[section].module
    is_package = importlib.util.find_spec(module).submodule_search_locations is not None  # type: ignore[union-attr]
    main = importlib.import_module(f"{module}.__main__" if is_package else module).main
    code = main([*words[:split], "--print-config", *words[split:]])
    told = capsys.readouterr()
    assert code == 0, told.err
    assert told.out.startswith(f"{section}:")
