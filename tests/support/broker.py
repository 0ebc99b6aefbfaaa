"""A RabbitMQ of one's own: Debian's, started by hand on loopback, with all of its files in one folder."""

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests.support.ports import free_port
from tests.support.waiting import wait_until

VARIABLE = "SGLANG_FAIR_AMQP"
"""Names a broker that tests may use, or says `START`: they start one of their own. Without it they are skipped, as they
take minutes."""
START = "start"

_SERVERS = sorted(Path("/usr/lib/rabbitmq/lib").glob("rabbitmq_server-*/sbin/rabbitmq-server"))
START_S = 120.0


def why_none_to_kill() -> str:
    """Why none is started; "" if one is."""
    if os.environ.get(VARIABLE) != START:
        return f"{VARIABLE} is not {START!r}"
    return "" if _SERVERS and shutil.which("epmd") else "rabbitmq-server is not installed"


def why_none() -> str:
    """Why there is no broker; "" if there is one, or one is started."""
    named = os.environ.get(VARIABLE, "")
    return why_none_to_kill() if named == START else "" if named else f"{VARIABLE} names no broker"


class Broker:
    """`url` once it has started."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._port = folder, free_port()
        self._epmd, self._dist = free_port(), free_port()
        self.url = f"amqp://guest:guest@127.0.0.1:{self._port}/"
        self._log = folder / "broker.log"
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Again after `kill`, too: it has what it had."""
        none = str(self._folder / "none")
        (self._folder / "plugins").write_text("[].\n")
        environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(self._folder),
            "LANG": "C.UTF-8",
            "RABBITMQ_NODENAME": f"fair{self._port}@localhost",
            "RABBITMQ_MNESIA_BASE": str(self._folder / "data"),
            "RABBITMQ_LOG_BASE": str(self._folder / "log"),
            "RABBITMQ_LOGS": "-",
            "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODE_PORT": str(self._port),
            "RABBITMQ_DIST_PORT": str(self._dist),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "ERL_EPMD_PORT": str(self._epmd),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(self._folder / "plugins"),
            "RABBITMQ_CONFIG_FILE": none,
            "RABBITMQ_ADVANCED_CONFIG_FILE": none,
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-kernel inet_dist_use_interface {127,0,0,1} +S 1:1 +sbwt none",
        }
        with self._log.open("wb") as log:
            for command in (["epmd"], [str(_SERVERS[-1])]):  # else the server starts an epmd that outlives it
                self._processes.append(
                    subprocess.Popen(
                        command, env=environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL,
                        start_new_session=True,
                    )
                )  # fmt: skip
        try:
            wait_until(self._is_up, "RabbitMQ", START_S)
        except BaseException:
            print(self._log.read_text(errors="replace")[-4000:])
            self.kill()
            raise

    def stop(self) -> None:
        """As an operator does."""
        server = self._processes[-1]
        server.terminate()
        server.wait(START_S)
        self.kill()

    def kill(self) -> None:
        """SIGKILL, to all of it."""
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self._processes.clear()

    def _is_up(self) -> bool:
        assert self._processes[-1].poll() is None, "it has ended"
        return b"Server startup complete" in self._log.read_bytes()


@contextlib.contextmanager
def broker_url(folder: Path) -> Iterator[str]:
    """Of the broker that is named, or of one that lives as long as this."""
    named = os.environ.get(VARIABLE)
    if named and named != START:
        yield named
        return
    made = Broker(folder)
    made.start()
    try:
        yield made.url
    finally:
        made.kill()
