"""Python imports this in each process that tests start. A replica, or the fork server of a cluster, becomes one that is
forked from the tests' fork server (`tests.support.fork_server`), where that runs: it has imported SGLang already."""

import os
import sys

MODULES = ("sglang_fair.engines.fork_server", "sglang_fair.engines.replica")


def become_forked() -> None:
    """Returns if the tests' fork server does not run. Otherwise this process ends as the one that is forked does."""
    import array
    import contextlib
    import json
    import signal
    import socket
    import traceback

    from sglang_fair.common.processes import die_with_supervisor

    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if connection.connect_ex("\0" + os.environ["SGLANG_FAIR_TEST_FORK_SERVER"]):
        connection.close()
        return
    try:
        wanted = {"argv": sys.orig_argv[2:], "env": dict(os.environ)}
        output = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [1]))]
        connection.sendmsg([json.dumps(wanted).encode()], output)
        pid = json.loads(connection.recv(1 << 16))["pid"]
        if noted := os.environ.get("SGLANG_FAIR_TEST_FORKED"):
            with open(noted, "a") as file:
                print(pid, file=file)

        def forward(number: int, _: object) -> None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, forward)
        die_with_supervisor()
        code = json.loads(connection.recv(1 << 16))["code"]
        if code < 0:
            signal.signal(-code, signal.SIG_DFL)
            os.kill(os.getpid(), -code)
        os._exit(code)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


started = sys.orig_argv[1:3]
if (
    started[:1] == ["-m"]
    and started[-1] in MODULES
    and os.environ.get("SGLANG_FAIR_TEST_PREFIX") == sys.prefix
):
    become_forked()
