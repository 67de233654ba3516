"""When modules are loaded, and how fast.

A room's front door opens the rooms behind it on first use (PEP 562), so that a mechanism loads without them.
"""

import ast
import atexit
import contextlib
import gc
import inspect
import sys
from collections.abc import Callable, Iterator
from importlib import import_module

from plpkg.signals import ended_by_ctrl_c


def on_first_use(package: str) -> Callable[[str], object]:
    """The ``__getattr__`` of a package: it imports on first use what type checkers import at once.

    What the package's own file imports under ``if TYPE_CHECKING:`` is read from its source, so that no second list
    says where a name is defined. The call stands under ``else:``, since a module with a ``__getattr__`` has any name,
    for a type checker.

    Parameters
    ----------
    package
        Its ``__name__``.
    """
    module = sys.modules[package]
    homes: dict[str, str] = {}
    for statement in ast.parse(inspect.getsource(module)).body:
        if isinstance(statement, ast.If) and ast.unparse(statement.test) == "TYPE_CHECKING":
            for imported in statement.body:
                if isinstance(imported, ast.ImportFrom) and imported.module:
                    homes |= {alias.name: imported.module for alias in imported.names}

    def __getattr__(name: str) -> object:  # noqa: N807 (PEP 562 names it)
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            home = import_module(homes[name])
            return vars(home)[name] if name in vars(home) else import_module(f"{home.__name__}.{name}")
        except ModuleNotFoundError as error:
            if (error.name or "plpkg").startswith("plpkg"):
                raise
            # Whoever lists a package's names (help, hasattr) asks for all of them, and takes this error for "not here".
            extras = "one of plpkg's extras brings it: [notebooks], [serve], [scale]"
            raise AttributeError(f"{package}.{name} needs the package {error.name!r}; {extras}") from error

    module.__dir__ = lambda: sorted({*vars(module), *homes})  # for whoever completes names
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
        atexit.register(_thaw_triton)


def _thaw_triton() -> None:
    """Triton, which torch imports if it can, reports what is not collected at the end: 64 lines of leaks."""
    if "triton" in sys.modules:
        gc.unfreeze()
