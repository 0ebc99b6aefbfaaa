"""Where a replica's ranks meet: a replica of one machine leaves no socket open to others, one of several is let be."""

import importlib
import os
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.listeners import exposed
from tests.support.ports import free_port

pytestmark = pytest.mark.engine

ALONE = SimpleNamespace(nnodes=1, dist_init_addr=None)
SPREAD = SimpleNamespace(nnodes=2, dist_init_addr="10.0.0.1:5000")


@pytest.mark.parametrize(
    ("parallel", "chosen", "expected"),
    [
        (ALONE, "tcp://10.0.0.7:31000", "tcp://127.0.0.1:31000"),
        (ALONE, "tcp://[fd00::7]:31000", "tcp://127.0.0.1:31000"),
        (ALONE, "tcp://127.0.0.1:31000", "tcp://127.0.0.1:31000"),
        (ALONE, "env://", "env://"),
        (SPREAD, "tcp://10.0.0.1:5000", "tcp://10.0.0.1:5000"),
    ],
)
def test_ranks_of_one_machine_meet_there(
    sglang: None, monkeypatch: pytest.MonkeyPatch, parallel: Any, chosen: str, expected: str
) -> None:
    from sglang_fair.overlay import ranks

    monkeypatch.setattr(ranks, "get_parallel", lambda: parallel)
    assert ranks.meet_here(chosen) == expected


@pytest.mark.parametrize(
    ("parallel", "before", "expected"),
    [(ALONE, {}, "lo"), (ALONE, {"GLOO_SOCKET_IFNAME": "eth1"}, "eth1"), (SPREAD, {}, None)],
)
def test_they_connect_there(
    sglang: None, parallel: Any, before: dict[str, str], expected: str | None
) -> None:
    from sglang_fair.overlay import ranks

    environ = dict(before)
    ranks.connect_here(parallel, environ)
    assert environ.get("GLOO_SOCKET_IFNAME") == expected


def test_the_store_listens_there_alone(sglang: None) -> None:
    """PyTorch's own listens everywhere, which shows that the test would see it."""
    from sglang_fair.overlay import ranks

    rendezvous = importlib.import_module("torch.distributed.rendezvous")
    original = getattr(rendezvous._create_c10d_store, "__wrapped__", rendezvous._create_c10d_store)
    timeout = timedelta(seconds=20)

    def seen() -> set[int]:
        return {one.port for one in exposed(os.getpid())}

    closed, opened = free_port(), free_port()
    before = seen()
    with ThreadPoolExecutor(2) as pool:  # each waits for the other
        both = [
            pool.submit(ranks.make_store, original, "127.0.0.1", closed, rank, 2, timeout) for rank in (0, 1)
        ]
    first, second = (one.result() for one in both)
    first.set("a", "1")
    assert second.get("a") == b"1"
    assert seen() == before
    everywhere = original("127.0.0.1", opened, 0, 1, timeout)
    assert seen() - before == {opened}
    del first, second, everywhere
