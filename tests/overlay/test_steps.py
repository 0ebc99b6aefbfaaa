"""The rule for steps inside SGLang's real scheduler: whoever runs is not stopped by whoever sends prompts."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sglang_fair.core.steps import LEAST_SHARE
from tests.support.step_attack import DECODE_S, PREFILL_S, RUNNING, STEPS, VICTIMS

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def attacks() -> dict[str, Any]:
    ended = subprocess.run(
        [sys.executable, "-m", "tests.support.step_attack"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    return json.loads(ended.stdout.splitlines()[-1])


def test_without_a_trickle_every_step_is_a_token_for_all(attacks: dict[str, Any]) -> None:
    found = attacks["dlpm, without a trickle"]
    assert set(found["output"].values()) == {STEPS * RUNNING // VICTIMS}
    assert found["steps"]["held"] == 0


@pytest.mark.parametrize("policy", ["dlpm", "vtc"])
def test_those_who_run_keep_their_share_beside_a_trickle_of_prompts(
    attacks: dict[str, Any], policy: str
) -> None:
    """Of five clients each is entitled to a fifth of the time. What the trickle does not get is not lost."""
    found = attacks[policy]
    share = 1 / (VICTIMS + 1)
    assert share > LEAST_SHARE
    alone = found["seconds"] / DECODE_S * RUNNING / VICTIMS
    for output in found["output"].values():
        assert output >= 0.9 * share * alone
    assert found["trickle"] * PREFILL_S >= 0.5 * found["seconds"]
    assert found["steps"]["held"] > 0
    assert found["steps"]["largest_lag_s"] <= found["steps"]["bound_s"]
    assert found["conserved"]


@pytest.mark.parametrize("policy", ["dlpm", "vtc"])
def test_with_prompts_first_they_get_nothing(attacks: dict[str, Any], policy: str) -> None:
    """What the rule is for."""
    found = attacks[f"{policy}, prompts first"]
    assert set(found["output"].values()) == {0}
    assert found["trickle"] == STEPS
    assert found["steps"] is None
