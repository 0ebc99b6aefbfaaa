"""Slurm on this machine: a controller and two nodes on loopback, with keys and folders of its own."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
from pathlib import Path

import psutil

from tests.support.live import living
from tests.support.ports import free_port
from tests.support.waiting import wait_until

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
