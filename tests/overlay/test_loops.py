"""SGLang's own loops with a model that takes no time: random requests, aborts, pauses and tiny pools, all policies."""

import json

import pytest

from sglang_fair.core import POLICIES
from tests.support import fork_server
from tests.support.budget import is_night, seeds
from tests.support.loops import LOOPS

SEEDS = seeds(20) if is_night() else (0,)
CASES = 2 * len(POLICIES) if is_night() else len(POLICIES)
"""For each seed, of some ninety requests: 108,000 in a night."""


@pytest.mark.engine
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("loop", LOOPS)
def test_every_request_ends_once_and_nothing_is_lost(loop: str, seed: int) -> None:
    """See `tests.support.loops`. What is met in passing is met often enough."""
    done = fork_server.run("-m", "tests.support.loops", loop, str(seed), str(CASES))
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert set(told["requests"]) == set(POLICIES)
    assert min(told["steps"].get(kind, 0) for kind in ("EXTEND", "DECODE", "MIXED")) > 0, told
    assert (
        min(told["aborted"].get(phase, 0) for phase in ("waits", "cut", "decodes", "under way", "over")) > 0
    ), told
    assert told["retracted"] > 0, told
    assert told["walks"] == 0, told
