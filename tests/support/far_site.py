"""A cluster over two networks: emulated replicas in the other one, routers and gateways in this one."""

import contextlib
import json
import os
import signal
import socket
import ssl
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from sglang_fair.common.curve import Keys, make
from sglang_fair.common.service_keys import replica_key
from sglang_fair.engines import fork_server
from sglang_fair.models import catalog
from sglang_fair.models.catalog import EMULATED
from tests.support.cable import BACK, FRONT, Cable
from tests.support.certificates import Certificates
from tests.support.fork_server import NETWORK
from tests.support.live import lives, living
from tests.support.ports import free_port
from tests.support.site import Process
from tests.support.waiting import DEADLINE_S, eventually, wait_until

MODEL = "llama-3.1-8b"
ENGINE = ("--engine", "emulated", "--gpu", "a100-80g", "--model", MODEL)
START_S = 300.0


class FarReplica:
    """Can be killed, and started again at the same address."""

    def __init__(
        self,
        cable: Cable,
        forks: list[socket.socket],
        name: str,
        options: Sequence[str],
        engine: Sequence[str],
        environment: Mapping[str, str],
    ) -> None:
        """`engine` are SGLang's own arguments; each start takes one of `forks`, connections to a fork server."""
        self.name = name
        self._forks, self._environment = forks, {**environment, NETWORK: str(cable.pid)}
        self.port, self.kv_port, self.load_port = free_port(), free_port(2), free_port()
        self.arguments = [
            "--name", name, *ENGINE, "--host", BACK, "--port", str(self.port), "--kv-port", str(self.kv_port),
            "--load-port", str(self.load_port), *options, "--", "--log-level", "warning", *engine,
        ]  # fmt: skip
        self.log = Path(tempfile.mkstemp(prefix=f"{name}-", suffix=".log")[1])
        self.pid = 0

    def worker(self, scheme: str) -> str:
        """As a router's --worker has it."""
        kv, replay, load = (
            f"tcp://{BACK}:{port}" for port in (self.kv_port, self.kv_port + 1, self.load_port)
        )
        return f"{self.name},http={scheme}://{BACK}:{self.port},kv={kv},replay={replay},load={load}"

    def start(self) -> None:
        self._connection = self._forks.pop()
        wanted = {"argv": ["sglang_fair.engines.replica", *self.arguments], "env": self._environment}
        with self.log.open("ab") as log:
            socket.send_fds(self._connection, [json.dumps(wanted).encode()], [log.fileno()])
        self.pid = json.loads(self._connection.recv(fork_server.LONGEST_MESSAGE))["pid"]

    def kill(self) -> None:
        """kill -9 to all of it; when it returns its ports are free."""
        first = psutil.Process(self.pid)
        family = [first, *first.children(recursive=True)]
        os.killpg(self.pid, signal.SIGKILL)
        wait_until(lambda: not living(family), "the end of a replica's processes")
        self._connection.close()
        self.pid = 0

    def close(self) -> None:
        if self.pid:
            with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
                self.kill()
        self.log.unlink(missing_ok=True)


class FarSite:
    """`async with` it: all of it runs, and knows each other. With `is_secure` behind keys, TLS and a replica's key."""

    def __init__(
        self,
        cable: Cable,
        forks: list[socket.socket],
        folder: Path,
        *,
        is_secure: bool,
        replicas: int,
        fronts: int,
        options: Sequence[str] = (),
    ) -> None:
        """`fronts` routers and as many gateways; `options` are the replicas'."""
        folder.mkdir(parents=True, exist_ok=True)
        self.scheme = "https" if is_secure else "http"
        self.folder = folder
        environment: dict[str, str] = {}
        common, served, believed, engine = ["--insecure"], [], [], []
        self.headers: dict[str, str] = {}
        self.authority = ""
        self.keys: Keys | None = None
        if is_secure:
            make(folder / "keys")
            self.keys = Keys.read(folder / "keys", "gateway")
            shown = Certificates.make(folder / "tls", (f"IP:{FRONT}", f"IP:{BACK}"))
            self.authority = shown.authority
            common, believed = ["--keys", str(folder / "keys")], ["--replica-ca", shown.authority]
            served = ["--tls-cert", shown.certificate, "--tls-key", shown.key]
            engine = ["--ssl-certfile", shown.certificate, "--ssl-keyfile", shown.key]
            environment = {replica_key.variable: "a replica's key"}
            self.headers = {"authorization": "Bearer a replica's key"}
        self.replicas = [
            FarReplica(cable, forks, f"r{at}", [*common, *options], engine, environment)
            for at in range(replicas)
        ]
        tokenizer = str(catalog.find(EMULATED + MODEL, None).path)
        workers = [word for one in self.replicas for word in ("--worker", one.worker(self.scheme))]
        self.router_ports = [free_port() for _ in range(fronts)]
        self.gateway_ports = [free_port() for _ in range(fronts)]
        bound = [f"tcp://{FRONT}:{port}" for port in self.router_ports]
        self.routers = [
            Process(
                f"router{at}", "router", "--bind", address, "--placement", "d2lpm", *common, *believed, *workers
            )
            for at, address in enumerate(bound)
        ]  # fmt: skip
        self.gateways = [
            Process(
                f"gateway{at}", "router.gateway", "--host", FRONT, "--port", str(port),
                "--model-name", MODEL, "--tokenizer", tokenizer,
                "--health-timeout", "4", "--connect-timeout", "2", *common, *believed, *served,
                *(word for address in bound for word in ("--router", address)),
                environment=environment,
            )
            for at, port in enumerate(self.gateway_ports)
        ]  # fmt: skip
        self.urls = [f"{self.scheme}://{FRONT}:{port}" for port in self.gateway_ports]
        self.http: aiohttp.ClientSession

    @property
    def tls(self) -> ssl.SSLContext | None:
        """What clients believe."""
        return ssl.create_default_context(cafile=self.authority) if self.authority else None

    async def __aenter__(self) -> "FarSite":
        self.http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=self.tls or True),
            timeout=aiohttp.ClientTimeout(total=DEADLINE_S),
        )
        try:
            for one in (*self.replicas, *self.routers, *self.gateways):
                one.start()
            await self.all_up()
        except BaseException as error:
            await self.__aexit__(type(error))
            raise
        return self

    async def __aexit__(self, kind: object, *_: object) -> None:
        await self.http.close()
        if kind is not None:
            for one in (*self.replicas, *self.routers, *self.gateways):
                if one.log.exists():
                    print(f"--- {one.name}\n{one.log.read_text()[-1500:]}", file=sys.stderr)
            ended = {one.name: code for one in self._started() if (code := one.exit_code()) is not None}
            print(f"ended by themselves: {ended}", file=sys.stderr)
        for one in (*self.gateways, *self.routers, *self.replicas):
            one.close()

    def _started(self) -> list[Process]:
        return [one for one in (*self.routers, *self.gateways) if one.is_started]

    async def all_up(self) -> None:
        """Until each gateway and router takes each replica for well."""
        for replica in self.replicas:
            await eventually(lambda one=replica: self._is_ready(one), f"{replica.name} is ready", START_S)
        for at in range(len(self.gateways)):
            await eventually(lambda at=at: self._is_up(at), "all know each other and are well", START_S)

    async def status(self, gateway: int = 0) -> dict[str, Any]:
        async with self.http.get(f"{self.urls[gateway]}/status") as answer:
            found: dict[str, Any] = await answer.json()
            return found

    async def book(self, replica: FarReplica) -> dict[str, Any]:
        """GET /fair."""
        url = f"{self.scheme}://{BACK}:{replica.port}/fair"
        async with self.http.get(url, headers=self.headers) as answer:
            found: dict[str, Any] = await answer.json()
            return found

    async def _is_ready(self, replica: FarReplica) -> bool:
        assert lives(replica.pid), f"{replica.name} has ended"
        url = f"{self.scheme}://{BACK}:{replica.port}/ready"
        async with self.http.get(url, headers=self.headers) as answer:
            return answer.status == 200

    async def _is_up(self, gateway: int) -> bool:
        state = await self.status(gateway)
        front, workers = state["gateway"], state["workers"].values()
        return (
            not front["fallback"]
            and not front["sick"]
            and [router["state"] for router in front["routers"]] == ["up"] * len(self.routers)
            and len(workers) == len(self.replicas) == front["workers"]
            and all(worker["state"] == "up" for worker in workers)
        )

    async def quiet(self) -> None:
        """Until nothing is in flight anywhere; each placement has ended once, and charges are what was computed."""

        async def settled(at: int) -> bool:
            state = await self.status(at)
            return not state["gateway"]["in_flight"] and not state["in_flight"]

        for at in range(len(self.gateways)):
            await eventually(lambda at=at: settled(at), "nothing is in flight")
        counts = (await self.status())["counts"]
        ended = sum(number for name, number in counts.items() if name.startswith("ended "))
        assert ended == counts.get("placed", 0) + counts.get("taken over", 0), counts
        for replica in self.replicas:

            async def idle(replica: FarReplica = replica) -> bool:
                totals = (await self.book(replica))["totals"]
                return not totals["running"] and not totals["waiting"]

            await eventually(idle, "nothing is computed for nobody")
