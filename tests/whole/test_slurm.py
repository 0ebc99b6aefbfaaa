"""Replicas as jobs of Slurm's: listed while they are ready, and one is cancelled under load."""

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import httpx
import psutil
import pytest

from router.replica_lists import specs
from sglang_fair.models.catalog import EMULATED as EMULATED_MODEL
from sglang_fair.models.catalog import find
from tests.support.front import front
from tests.support.live import EMULATED, living
from tests.support.ports import free_port
from tests.support.streams import Load
from tests.support.waiting import eventually, wait_until

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scancel", "squeue", "sinfo")

CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
MailProg=/bin/true
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,sched_interval=2
KillWait=20
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={first} CPUs=2 State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={second} CPUs=2 State=UNKNOWN
PartitionName=all Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
"""


def why_not() -> str:
    """Why Slurm does not run here; "" if it does."""
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        return f"Slurm is not installed: {', '.join(missing)} (apt-get install slurm-wlm munge)"
    return "" if os.geteuid() == 0 else "slurmd needs root"


class Slurm:
    """A controller and the nodes n1 and n2, from `with` to its end."""

    def __enter__(self) -> "Slurm":
        self.folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
        self._daemons: list[psutil.Popen] = []
        first = free_port(2)
        configuration = self.folder / "slurm.conf"
        configuration.write_text(
            CONFIGURATION.format(
                host=socket.gethostname(), folder=self.folder, port=free_port(), first=first, second=first + 1
            )
        )
        (self.folder / "state").mkdir()
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        self.environment = {**os.environ, "SLURM_CONF": str(configuration)}
        try:
            self._start(
                "munged", "--foreground", "--force", f"--key-file={key}", f"--socket={self.folder}/munge.socket",
                f"--pid-file={self.folder}/munge.pid", f"--log-file={self.folder}/munge.log",
                f"--seed-file={self.folder}/munge.seed",
            )  # fmt: skip
            wait_until((self.folder / "munge.socket").exists, "munge")
            self._start("slurmctld", "-D", "-f", str(configuration))
            for node in ("n1", "n2"):
                self._start("slurmd", "-D", "-f", str(configuration), "-N", node)
            wait_until(lambda: self.run("sinfo", "-h", "-o", "%T").split() == ["idle"], "idle nodes")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.run("scancel", "--user=root")
        with contextlib.suppress(AssertionError):
            wait_until(lambda: not self.run("squeue", "-h"), "the end of all jobs", 30)
        family = [one for daemon in self._daemons for one in (daemon, *_children(daemon))]
        for daemon in reversed(self._daemons):
            daemon.send_signal(signal.SIGTERM)
        psutil.wait_procs(self._daemons, timeout=10)
        for process in living(family):
            process.kill()
        psutil.wait_procs(self._daemons)
        shutil.rmtree(self.folder, ignore_errors=True)

    def run(self, *words: str) -> str:
        """What a command of Slurm's prints; \"\" if it fails."""
        done = subprocess.run(
            words, env=self.environment, capture_output=True, text=True, check=False, timeout=60
        )
        return done.stdout.strip() if done.returncode == 0 else ""

    def _start(self, *words: str) -> None:
        log = self.folder / f"{words[0]}-{len(self._daemons)}.out"
        with log.open("wb") as output:
            self._daemons.append(
                psutil.Popen(
                    words, stdout=output, stderr=output, env=self.environment, start_new_session=True
                )
            )


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []


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
