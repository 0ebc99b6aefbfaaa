"""The command line: quick help, one line for each mistake, arguments that reach the programs they are for."""

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from router.gateway.guard import KEY_VARIABLE
from sglang_fair import cli
from sglang_fair.cluster import __main__ as cluster_command
from sglang_fair.cluster import status
from sglang_fair.common.service_keys import replica_key
from sglang_fair.models import catalog as models


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, arguments)


class TestHelp:
    def test_help_loads_no_engine_and_no_server(self) -> None:
        code = (
            "import sys; sys.argv[1:] = ['--help']\n"
            "from sglang_fair.cli import main\n"
            "try: main()\n"
            "except SystemExit as end: assert not end.code\n"
            "heavy = {'torch', 'sglang', 'transformers', 'zmq', 'aiohttp', 'fastapi', 'numpy'}\n"
            "assert not heavy & set(sys.modules)"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        for command in ("cluster", "replica", "router", "gateway", "compare", "status", "models"):
            assert command in done.stdout


@pytest.fixture(scope="module")
def tiny() -> None:
    """Whoever prepares a model says so, once."""
    models.find("tiny")


def run_command(*arguments: str) -> int:
    return cluster_command.main(["--port", "0", *arguments])


class TestCluster:
    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("arguments", "code", "said"),
        [
            (["--policy", "magic"], 2, "unknown --policy 'magic'"),
            (["--client-weights", "{"], 2, "--client-weights is not JSON"),
            (["--model", "/no/such/folder", "--device", "cpu"], 2, "there is no model folder"),
            (["--host", "192.0.2.1", "--insecure", "--device", "cpu", "--model", "tiny"], 1,
             "cannot listen on 192.0.2.1"),
        ],
    )  # fmt: skip
    @pytest.mark.usefixtures("tiny")
    def test_a_mistake_is_one_line_and_starts_nothing(
        self, arguments: list[str], code: int, said: str, capfd: pytest.CaptureFixture[str]
    ) -> None:
        assert run_command(*arguments) == code
        told = capfd.readouterr()  # the process that looks for the model writes there too
        (line,) = told.err.splitlines()
        assert line.startswith("sglang-fair")
        assert said in line
        assert not told.out

    @pytest.mark.usefixtures("tiny")
    def test_a_port_in_use(self, capfd: pytest.CaptureFixture[str]) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = str(server.getsockname()[1])
            code = cluster_command.main(["--port", port, "--device", "cpu", "--model", "tiny"])
        assert code == 1
        assert capfd.readouterr().err == (
            f"sglang-fair: port {port} is in use; choose another with --port, or --port 0 for a free one\n"
        )


class TestPrograms:
    @pytest.mark.parametrize("name", list(cli.PROGRAMS))
    def test_arguments_are_passed_on_untouched(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        became: list[list[str]] = []

        def instead(_: str, argv: list[str]) -> None:
            became.append(argv)
            raise SystemExit(0)

        monkeypatch.setattr(cli.os, "execv", instead)
        monkeypatch.setattr(sys, "argv", ["sglang-fair", name, "--help", "--", "--tp", "2"])
        with pytest.raises(SystemExit):
            cli.main()
        assert became == [[sys.executable, "-m", cli.PROGRAMS[name].module, "--help", "--", "--tp", "2"]]

    @pytest.mark.parametrize(
        ("line", "said"),
        [
            ("nope", "sglang-fair: No such command 'nope'. (see sglang-fair --help)"),
            ("bench nope", "sglang-fair bench: No such command 'nope'."),
            ("status --wach", "sglang-fair status: No such option: --wach (Possible options: --watch)"),
            ("status --watch x", "sglang-fair status: Invalid value for '--watch'"),
            ("workers lisst", "sglang-fair workers: No such command 'lisst'. Did you mean 'list'?"),
            ("workers drain", "sglang-fair workers drain: Missing argument 'name'."),
        ],
    )
    def test_a_mistake_is_one_line(
        self, line: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(sys, "argv", ["sglang-fair", *line.split()])
        with pytest.raises(SystemExit) as end:
            cli.main()
        shown = capsys.readouterr()
        assert (end.value.code, shown.out) == (2, "")
        assert shown.err.startswith(said)
        assert shown.err.count("\n") == 1


FRONT = {
    "placement": "d2lpm",
    "workers": {
        "r0": {"url": "", "in_flight": 1, "dispatched": 5, "tree_tokens": 160},
        "r1": {"url": "http://127.0.0.1:9", "in_flight": 0, "dispatched": 2, "tree_tokens": 0},
    },
}
FAIR = {
    "policy": "dlpm",
    "clients": {
        "bob": {
            "counter": -12.0, "extend_tokens": 30, "output_tokens": 10, "cached_tokens": 64, "service": 50.0,
            "waiting": 2, "running": 1,
        },
        "alice": {
            "counter": None, "extend_tokens": 100, "output_tokens": 25, "cached_tokens": 0, "service": 150.0,
            "waiting": 0, "running": 0,
        },
    },
    "conservation": {"ok": True},
}  # fmt: skip


class Answers(BaseHTTPRequestHandler):
    """A gateway and a replica on one port."""

    keys: ClassVar[dict[str, str]] = {}
    """What a path asks for."""

    def do_GET(self) -> None:
        key = self.keys.get(self.path)
        if key is not None and self.headers["authorization"] != f"Bearer {key}":
            self.send_error(401)
            return
        own = f"http://{self.headers['host']}"
        answers: dict[str, Any] = {
            "/status": {
                **FRONT,
                "workers": {**FRONT["workers"], "r0": {**FRONT["workers"]["r0"], "url": own}},
            },
            "/fair": FAIR,
        }
        body = json.dumps(answers[self.path]).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Silence."""


@pytest.fixture
def gateway() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


class TestStatus:
    def test_clients_are_added_up_over_replicas(self) -> None:
        totals = status.by_client({"r0": FAIR, "r1": FAIR, "r2": None})
        assert list(totals) == ["alice", "bob"]
        assert totals["bob"] == {
            "client": "bob", "service": 100.0, "share": "25%", "computed": 60, "cached": 128, "output": 20,
            "waiting": 4, "running": 2, "dlpm r0": -12.0, "dlpm r1": -12.0,
        }  # fmt: skip

    def test_the_tables(self, gateway: str) -> None:
        found = status.read(gateway)
        assert found["replicas"]["r1"] is None
        console = Console(width=140, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
        with console.file:
            console.print(status.render(found))
            shown = console.export_text()
        rows = {
            cells[0]: cells[1:]
            for cells in (line.replace("│", " ").split() for line in shown.splitlines())
            if cells
        }
        assert rows["alice"] == ["150", "75%", "100", "0", "25", "0", "0"]
        assert rows["bob"] == ["50", "25%", "30", "64", "10", "2", "1", "-12"]
        assert rows["r0"][:5] == ["1", "5", "160", "dlpm", "balance"]
        assert "does not answer" in shown

    def test_keys(self, gateway: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Answers, "keys", {"/status": "admin's", "/fair": "replicas'"})
        for name in (KEY_VARIABLE, replica_key.variable):
            monkeypatch.delenv(name, raising=False)
        refused = invoke("status", gateway)
        assert refused.exit_code == 1
        assert KEY_VARIABLE in refused.output
        monkeypatch.setenv(KEY_VARIABLE, "admin's")
        shown = invoke("status", gateway).output
        assert "asks for its key" in shown
        assert replica_key.variable in shown
        monkeypatch.setenv(replica_key.variable, "replicas'")
        shown = invoke("status", gateway).output
        assert "alice" in shown
        assert replica_key.variable not in shown

    def test_json_and_silence(self, gateway: str) -> None:
        assert json.loads(invoke("status", gateway, "--json").output)["replicas"]["r0"]["policy"] == "dlpm"
        lost = invoke("status", "http://127.0.0.1:9")
        assert lost.exit_code == 1
        assert "http://127.0.0.1:9/status does not answer" in lost.output
