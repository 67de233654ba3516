"""A socket in the middle of a connection, which keeps the bytes of the TCP stream each way."""

import contextlib
import socket
import threading

from plpkg.validation import host_and_port


class Tap:
    """Connect to ``address`` instead of ``target``; what has passed is in ``up`` and ``down``.

    A byte is kept before it is passed on: whoever has read an answer finds all of it here.
    """

    def __init__(self, target):
        self._target, self._sockets = host_and_port(target), []
        self.up, self.down = bytearray(), bytearray()

    def __enter__(self):
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets.append(self._listener)
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_):
        for each in self._sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._target)
                self._sockets += near, far
                for source, sink, kept in ((near, far, self.up), (far, near, self.down)):
                    sink.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    threading.Thread(target=self._pass_on, args=(source, sink, kept), daemon=True).start()

    def _pass_on(self, source, sink, kept):
        with contextlib.suppress(OSError):
            while data := source.recv(2**16):
                kept += data
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
