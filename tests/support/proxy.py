"""A TCP proxy that keeps a copy of everything that goes through it, both ways."""

import socket
import threading


class Capture:
    """`with` it: connect to `address` in place of the target's."""

    def __init__(self, target: str) -> None:
        """`target` is tcp://HOST:PORT."""
        host, _, port = target.removeprefix("tcp://").rpartition(":")
        self._target = host, int(port)
        self._seen: list[bytes] = []
        self._open: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"

    @property
    def bytes(self) -> bytes:
        return b"".join(self._seen)

    def __enter__(self) -> "Capture":
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        for one in (self._listener, *self._open):
            one.close()

    def _accept(self) -> None:
        try:
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._target)
                self._open += [client, server]
                for source, to in ((client, server), (server, client)):
                    threading.Thread(target=self._copy, args=(source, to), daemon=True).start()
        except OSError:
            pass

    def _copy(self, source: socket.socket, to: socket.socket) -> None:
        try:
            while data := source.recv(1 << 16):
                self._seen.append(data)
                to.sendall(data)
        except OSError:
            pass
        finally:
            for one in (source, to):
                one.close()
