"""Several processes at one port: each gets its part of the connections, and no stranger any."""

import multiprocessing
import pickle
import socket
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler

import pytest

from router.gateway.address import SharedPort


def serve(sockets: list[socket.socket], told: Connection) -> None:
    """Listens, says so, and says how many have connected when it is asked."""
    [own] = sockets
    own.listen(256)
    told.send("listens")
    told.recv()
    own.setblocking(False)
    taken = []
    while True:
        try:
            taken.append(own.accept()[0])
        except BlockingIOError:
            break
    told.send(len(taken))


@pytest.mark.slow
def test_connections_that_come_at_once_are_dealt_out() -> None:
    context = multiprocessing.get_context("spawn")
    with SharedPort("127.0.0.1", 0) as port:
        number = port.getsockname()[1]
        ends = [context.Pipe() for _ in range(2)]
        workers = [context.Process(target=serve, args=([port], far)) for _, far in ends]
        for worker in workers:
            worker.start()
        for near, _ in ends:
            assert near.poll(60)
            assert near.recv() == "listens"
        clients = [socket.create_connection(("127.0.0.1", number)) for _ in range(128)]
        for near, _ in ends:
            near.send("how many?")
        found = [near.recv() for near, _ in ends if near.poll(60)]
        for worker in workers:
            worker.join()
        for client in clients:
            client.close()
        for pipe in ends:
            for end in pipe:
                end.close()
    assert sum(found) == 128
    assert min(found) > 20


def test_a_port_that_somebody_has_is_not_shared() -> None:
    with SharedPort("127.0.0.1", 0) as first:
        number = first.getsockname()[1]
        own = pickle.loads(ForkingPickler.dumps(first))
        with own:
            own.listen()
            with pytest.raises(OSError, match="in use"):
                SharedPort("127.0.0.1", number)
