"""The service in a thread, beside what asks it: a notebook, a test. ``plpkg serve`` is a process of its own."""

import asyncio
import signal
import threading
import time
from collections.abc import Callable

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from plpkg.serving.service.http.answers import error_response

GRACE_S = 1
"""For how long answers under way go on where the service is to end soon; then they end with an error."""
CLOSING_S = 2
"""Seconds that the end itself takes: :data:`GRACE_S`, half a one for who reads nothing, and the application."""


class Protocol(H11Protocol):
    """Uvicorn's, of which a head that is too long or broken has an error in OpenAI's form, too."""

    def send_400_response(self, msg: str) -> None:
        """The end of a connection whose head cannot be read."""
        body = bytes(error_response(400, "the head of the request cannot be read, or is longer than 64 kB").body)
        head = [(b"content-type", b"application/json"), (b"connection", b"close")]
        head += [(b"content-length", str(len(body)).encode()), *self.server_state.default_headers]
        for event in (
            h11.Response(status_code=400, headers=head, reason=b"Bad Request"), h11.Data(data=body), h11.EndOfMessage(),
        ):  # fmt: skip
            self.transport.write(self.conn.send(event))
        self.transport.close()


class Server(uvicorn.Server):
    """Uvicorn's server. When it is to end, it lets nobody in, and ends within ``grace_s``; until then answers go on.

    SIGINT (Ctrl-C) and any second signal end that time. From then on it takes about :data:`CLOSING_S`: what has not
    ended within :data:`GRACE_S` is told why. Left to itself uvicorn would break the connections off, and close the
    application only then. ``ready`` is called once it answers; signals end it well from then on.
    """

    def __init__(self, application, grace_s: float = 0, ready: Callable[[], None] = lambda: None, **options) -> None:
        self._grace_s = grace_s
        self._ready = ready
        # httptools, which uvicorn prefers, takes a head of any size from anybody
        super().__init__(
            uvicorn.Config(
                _answering(application),
                http=Protocol,
                log_level="warning",
                timeout_graceful_shutdown=GRACE_S + 0.5,  # pyright: ignore[reportArgumentType] (a float serves as well)
                **options,
            )
        )

    def handle_exit(self, sig, frame) -> None:
        """A signal has come."""
        if self.should_exit or sig == signal.SIGINT:
            self._grace_s = 0
        super().handle_exit(sig, frame)
        self.force_exit = False  # or the application would not be closed

    async def startup(self, sockets=None) -> None:
        """As uvicorn's, which has taken the signals before."""
        await super().startup(sockets)
        if self.started:
            self._ready()

    async def shutdown(self, sockets=None) -> None:
        """As uvicorn's; the application, and with it the requests, is closed when the grace is over."""
        for each in (*self.servers, *(sockets or ())):
            each.close()
        for connection in [*self.server_state.connections]:
            connection.shutdown()  # after what is being answered
        began = time.monotonic()
        while self.server_state.tasks and time.monotonic() < began + self._grace_s - CLOSING_S:
            await asyncio.sleep(0.1)

        async def close() -> None:
            await asyncio.sleep(GRACE_S)
            await self.lifespan.shutdown()

        closing = asyncio.create_task(close())
        await super().shutdown(sockets)
        closing.cancel()


def _answering(application):
    """An application whose calls are answered also when the server cancels them: what still waits for a store, say."""

    async def call(scope, receive, send) -> None:
        begun = scope["type"] != "http"

        async def noticed(message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await application(scope, receive, noticed)
        except asyncio.CancelledError:
            if not begun:
                await error_response(503, "the service is ending")(scope, receive, send)

    return call


class Listener:
    """Serves an application on a port of this machine until it is closed; a context manager.

    Attributes
    ----------
    address
        Where: ``http://127.0.0.1:PORT``; the port is a free one.

    Raises
    ------
    RuntimeError
        It did not start; the log says why.
    """

    def __init__(self, application) -> None:
        self._server = Server(application, port=0)
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        while not self._server.started:
            if not self._thread.is_alive():
                raise RuntimeError("the service did not start")
            time.sleep(0.01)
        self.address = f"http://127.0.0.1:{self._server.servers[0].sockets[0].getsockname()[1]}"

    def __enter__(self) -> "Listener":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        """End the service; requests that are under way have a second to end."""
        self._server.should_exit = True
        self._thread.join()
