"""Options that users' scripts rely on, of commands without a page of settings: none disappears unnoticed.

What the other programs have, and by default, is in docs/settings.md, which is made of their table.
"""

import re
import subprocess
import sys

import pytest

from sglang_fair import cli

PROGRAMS = {
    "compare": "workloads s2 schedulers placements duration drain repeats seed load rates model tokenizer device "
    "engine gpu cost-model time-scale replicas quantum worker-quantum good-clients question-tokens thought-tokens "
    "article-tokens judgement-tokens paper-scale json out resume",
    "simulate": "gpu model cost-model kv-tokens max-running chunked-prefill replicas schedulers quantum "
    "worker-quantum policy-options placement-options cost payer stall-ms target-tpot-ms "
    "client-weights hop workloads trace rate load cv "
    "duration drain good-clients question-tokens thought-tokens article-tokens judgement-tokens repeats seed jobs "
    "out json",
    "reproduce": "quick jobs out again list page publish",
    "calibrate": "out context quick seed",
}
BENCHES = {
    "scheduler": "json quick policies queued clients prompt-tokens steps seed",
    "router": "json quick placements prompt-tokens workers tree-tokens decisions seed",
    "gateway": "json quick seconds rounds seed",
    "serve": "url api model api-key identity keys workload clients rate concurrency cv input output prefix "
    "paper-scale questions articles trace tokenizer duration warm-up drain timeout connections cost stop-at-eos "
    "temperature seed records json",
    "isolation": "quick attacks policies placement light replicas gpu model time-scale seconds repeats seed "
    "sglang-router records json",
}
"""The options of each command, without their dashes."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "options"),
    [
        *((cli.PROGRAMS[name].module, options) for name, options in PROGRAMS.items()),
        *((cli.BENCHES[name].module, options) for name, options in BENCHES.items()),
    ],
    ids=[*PROGRAMS, *BENCHES],
)
def test_a_command_has_its_options(module: str, options: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", module, "--help"], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    shown = set(re.findall(r"(?<![\w-])--[a-z0-9][a-z0-9-]*", done.stdout))
    assert {f"--{name}" for name in options.split()} <= shown
