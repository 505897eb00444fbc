"""A proxy whose connections can be cut, to imitate a failing network."""

import socket
import threading
from contextlib import suppress
from urllib.parse import urlsplit


class Proxy:
    """Forwards connections from its own port to the server at `url` until it is cut."""

    def __init__(self, url: str) -> None:
        self.lead_to(url)
        self._sockets: set[socket.socket] = set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._port = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self._port}"
        self.mend()

    def lead_to(self, url: str) -> None:
        """Forward new connections to the server at `url`."""
        target = urlsplit(url)
        self._target = (target.hostname, target.port)

    def mend(self) -> None:
        """Let connections through again."""
        if self._listener.fileno() == -1:
            self._listener = socket.create_server(("127.0.0.1", self._port))
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def cut(self) -> None:
        """End all connections and refuse new ones."""
        for each in [self._listener, *self._sockets]:
            with suppress(OSError):  # it has ended
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        self._sockets.clear()

    def _accept(self, listener: socket.socket) -> None:
        with suppress(OSError):  # cut
            while True:
                ours, _ = listener.accept()
                theirs = socket.create_connection(self._target)
                self._sockets |= {ours, theirs}
                for source, target in ((ours, theirs), (theirs, ours)):
                    threading.Thread(target=_pump, args=(source, target), daemon=True).start()


def _pump(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):  # cut, or ended by the other side
        while data := source.recv(1 << 16):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
