"""Replicas as jobs of Slurm's: listed while they are ready, and one is cancelled under load."""

import asyncio
import contextlib
import os
import sys
from pathlib import Path

import httpx
import pytest

from router.replica_lists import specs
from sglang_fair.models.catalog import EMULATED as EMULATED_MODEL
from sglang_fair.models.catalog import find
from tests.support.front import front
from tests.support.live import EMULATED
from tests.support.slurm import Slurm, why_not
from tests.support.streams import Load
from tests.support.waiting import eventually, wait_until

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.machine,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
]

START_S = 300.0
"""Until two replicas have started, on however busy a machine."""

SCRIPT = Path(__file__).parents[2] / "deploy/slurm/replicas.sbatch"


def listed_in(path: Path) -> list[str]:
    return [up.worker for up in specs.lines(path.read_text())] if path.exists() else []


def known(url: str) -> set[str]:
    """The replicas that the router knows."""
    with contextlib.suppress(httpx.TransportError, ValueError):
        answer = httpx.get(f"{url}/status", timeout=10)
        return set(answer.json().get("workers", {})) if answer.status_code == 200 else set()
    return set()


def test_jobs_list_their_replicas_and_no_request_is_lost_when_one_is_cancelled(tmp_path: Path) -> None:
    listed = tmp_path / "replicas"
    tokenizer = find(EMULATED_MODEL + EMULATED[-1], None).path
    options = ("--replicas-file", str(listed), "--page-size", "16")
    with Slurm() as slurm, front(tokenizer, tmp_path, options) as url:
        slurm.environment |= {
            "SGLANG_FAIR_LIST": str(listed), "SGLANG_FAIR_ADDRESS": "127.0.0.1", "SGLANG_FAIR_PYTHON": sys.executable,
            "PYTHONPATH": os.pathsep.join([os.environ["PYTHONPATH"], *sys.path]),
        }  # fmt: skip
        submitted = slurm.run(
            "sbatch", "--parsable", "--array=0-1", "--exclusive", f"--output={tmp_path}/job-%a.log", str(SCRIPT),
            *EMULATED,
        )  # fmt: skip
        assert submitted
        logs = "".join(log.read_text()[-2000:] for log in tmp_path.glob("job-*.log"))
        wait_until(lambda: len(known(url)) == 2, f"two replicas {logs}", START_S)
        assert sorted(slurm.run("squeue", "-h", "-o", "%N").split()) == ["n1", "n2"]
        assert sorted(listed_in(listed)) == sorted(known(url))
        of = {one.partition("-")[0].removeprefix("j"): one for one in listed_in(listed)}
        tasks = dict(line.split() for line in slurm.run("squeue", "-h", "-o", "%A %i").splitlines())
        (first, _), (second, stays) = ((tasks[job], of[job]) for job in of)

        async def body() -> None:
            load = Load(url)
            await load.goes_on()
            await asyncio.to_thread(slurm.run, "scancel", first)
            await eventually(lambda: listed_in(listed) == [stays], "the job takes its line away")
            await eventually(lambda: asyncio.to_thread(lambda: known(url) == {stays}), "the router sees it")
            await load.goes_on()
            await load.stop()
            assert load.outcomes.keys() == {"served"}, load.outcomes

        asyncio.run(body())
        slurm.run("scancel", "--batch", "--signal=TERM", second)
        wait_until(lambda: not listed_in(listed), "the other one leaves, too")
        wait_until(lambda: not slurm.run("squeue", "-h"), "the end of all jobs")
        log = tmp_path / f"job-{second.rpartition('_')[2]}.log"
        assert "ended: exit code" not in log.read_text(), "it finished"
