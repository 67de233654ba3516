"""How a command ends when the terminal, or another program, asks it to."""

import contextlib
import signal
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def ended_by_ctrl_c() -> Iterator[None]:
    """SIGINT ends the process, as it ends one that is not Python's; another handler, or none, stays as it is."""
    python_s = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not python_s or threading.current_thread() is not threading.main_thread():  # nobody else may set one
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Within it, SIGTERM, SIGINT and SIGHUP raise a KeyboardInterrupt, once: the cleaning up is not interrupted.

    Linux ignores a SIGTERM without a handler for the first process of a container. Under ``nohup``, SIGHUP stays
    ignored. In another thread than the main one, which may set no handlers, nothing is changed.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    hangup = getattr(signal, "SIGHUP", signal.SIGTERM)  # Windows has none
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, hangup)}

    def end(*_) -> None:
        for number in before:
            signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    if before[hangup] is not signal.SIG_IGN:  # uvicorn, while it runs, takes the other two only
        signal.signal(hangup, lambda *_: signal.raise_signal(signal.SIGTERM))
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
