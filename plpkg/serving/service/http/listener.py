"""The service in a thread, beside what asks it: a notebook, a test. ``plpkg serve`` is a process of its own."""

import threading
import time

import uvicorn


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
        config = uvicorn.Config(application, port=0, http="h11", log_level="warning", timeout_graceful_shutdown=1)
        self._server = uvicorn.Server(config)
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
        """End the service, and the requests that are under way a second later."""
        self._server.should_exit = True
        self._thread.join()
