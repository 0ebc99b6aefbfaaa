"""A replica that is told to end does so, whatever connections its clients keep."""

import os
import signal
import socket

import pytest

from tests.support.live import Replica
from tests.support.waiting import wait_until

pytestmark = pytest.mark.engine

HEAD = (
    b"POST /generate HTTP/1.1\r\nhost: r\r\ncontent-type: application/json\r\ncontent-length: 1000\r\n\r\n{"
)


def test_half_a_request_holds_nobody_back() -> None:
    with (
        Replica("--policy", "dlpm") as replica,
        socket.create_connection(("127.0.0.1", replica.port)) as client,
    ):
        replica.generate("alice", [1, 2, 3], 2)
        client.sendall(HEAD)
        assert replica.process is not None
        process = replica.process
        os.kill(process.pid, signal.SIGTERM)
        wait_until(lambda: process.poll() is not None, "it has ended")
