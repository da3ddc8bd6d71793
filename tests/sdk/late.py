"""An engine that is down until it is asked to come up: a port that nobody listens on, then a way to the real
one."""

from __future__ import annotations

import selectors
import socket
import threading
from urllib.parse import urlsplit

from tests.engines_real.pair import free_port


class Late:
    """`url` refuses connections until `open()`; from then on each is passed to `target`."""

    def __init__(self, target: str) -> None:
        to = urlsplit(target)
        self._target = to.hostname or "", to.port or 0
        self._port = free_port()
        self._listener: socket.socket | None = None
        self._threads: list[threading.Thread] = []
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self.url = f"http://127.0.0.1:{self._port}"

    def open(self) -> None:
        if self._listener is None:
            self._listener = socket.create_server(("127.0.0.1", self._port))
            self._run(self._accept, self._listener)

    def close(self) -> None:
        """End every connection and thread."""
        for sock in [self._listener, *(end for pair in self._pairs for end in pair)]:
            if sock is not None:
                _shut(sock)
        for thread in self._threads:
            thread.join()

    def _run(self, target: object, *args: socket.socket) -> None:
        thread = threading.Thread(target=target, args=args)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self, listener: socket.socket) -> None:
        with listener:
            while True:
                try:
                    client, _ = listener.accept()
                except OSError:
                    return
                engine = socket.create_connection(self._target)
                self._pairs.append((client, engine))
                self._run(_pass_on, client, engine)


def _pass_on(client: socket.socket, engine: socket.socket) -> None:
    with client, engine, selectors.DefaultSelector() as selector:
        selector.register(client, selectors.EVENT_READ, engine)
        selector.register(engine, selectors.EVENT_READ, client)
        while True:
            for key, _ in selector.select():
                source, target = key.fileobj, key.data
                assert isinstance(source, socket.socket)
                try:
                    data = source.recv(65536)
                    if not data:
                        return
                    target.sendall(data)
                except OSError:
                    return


def _shut(sock: socket.socket) -> None:
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        sock.close()
