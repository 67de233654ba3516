"""When modules are loaded, and how fast.

A room's front door opens the rooms behind it on first use (PEP 562), so that a mechanism loads without them.
"""

import contextlib
import gc
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from importlib import import_module


def on_first_use(package: str, **places: str) -> Callable[[str], object]:
    """The ``__getattr__`` of a package.

    Parameters
    ----------
    package
        Its ``__name__``.
    **places
        For each name the module within the package that defines it: ``CloudServer="wire.cloud"``; a dot before it,
        ``Adapter=".adapters"``, leads out of the package. A place that ends in the name is that module itself:
        ``training="programs.training"``.
    """

    def __getattr__(name: str) -> object:  # noqa: N807 (PEP 562 names it)
        if name not in places:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = import_module(f".{places[name]}", package)
        return module if module.__name__.endswith(f".{name}") else getattr(module, name)

    module = sys.modules[package]
    module.__dir__ = lambda: sorted({*vars(module), *places})  # for whoever completes names
    return __getattr__


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Import without the garbage collector, which would look at all that modules hold again and again: 1 s of 3.6.

    What a module holds lives as long as the process, so that the collector leaves it out later as well. In a process
    that has loaded torch before, where other objects may become garbage, nothing is changed. Ctrl-C ends a command
    that imports at once, without a traceback.
    """
    if "torch" in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        with ended_by_ctrl_c():
            yield
    finally:
        gc.freeze()
        gc.enable()


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
