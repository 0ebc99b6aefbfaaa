"""A PostgreSQL server of a test's own, in a folder of its own, of Debian's package `postgresql`."""

import os
import pwd
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import psycopg

from tests.support.ports import free_port

USER = "postgres"


def why_none() -> str | None:
    """Why there can be no server; None: there can."""
    return None if _programs() else "no PostgreSQL here: apt-get install postgresql"


def _programs() -> Path | None:
    """Debian has them outside of PATH."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    on_path = shutil.which("initdb")
    return found[-1].parent if found else Path(on_path).parent if on_path else None


class Postgres:
    """Runs within `with`. It does not run as root, so then its folder belongs to the package's user."""

    def __enter__(self) -> "Postgres":
        programs = _programs()
        assert programs is not None
        self._programs, self._port = programs, free_port()
        self._folder = Path(tempfile.mkdtemp(prefix="postgres-"))
        self._as: dict[str, Any] = {}
        if os.getuid() == 0:
            user = pwd.getpwnam(USER)
            os.chown(self._folder, user.pw_uid, user.pw_gid)
            self._as = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
        self._run(
            "initdb", "--auth=trust", "--encoding=UTF8", "--locale=C", f"--username={USER}", str(self.data)
        )
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        shutil.rmtree(self._folder)

    @property
    def data(self) -> Path:
        """What it keeps."""
        return self._folder / "data"

    @property
    def url(self) -> str:
        """As `--batches` has it."""
        return f"postgresql://{USER}@127.0.0.1:{self._port}/{USER}"

    def database(self, name: str) -> str:
        """A new database of this name, and its address."""
        with psycopg.connect(self.url, autocommit=True) as db:
            db.execute(f"CREATE DATABASE {name}")
        return self.url.removesuffix(USER) + name

    def start(self) -> None:
        """It answers when this returns."""
        options = f"-p {self._port} -c listen_addresses=127.0.0.1 -c unix_socket_directories="
        self._run(
            "pg_ctl", "start", "-w", "-D", str(self.data), "-l", str(self._folder / "log"), "-o", options
        )

    def stop(self) -> None:
        """At once, as after a loss of power."""
        self._run("pg_ctl", "stop", "-w", "-D", str(self.data), "-m", "immediate")

    def _run(self, program: str, *arguments: str) -> None:
        command = [str(self._programs / program), *arguments]
        subprocess.run(
            command, check=True, cwd=self._folder, stdout=subprocess.DEVNULL, timeout=120, **self._as
        )
